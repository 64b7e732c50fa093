"""A plain training loop: a small convolutional network by SGD, with settings that somebody typed in.

hyperopt.py differs from this file in the function `train`; docs/worked/tuning.md shows the difference.

    python examples/hyperopt_plain.py --data DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 100
BATCH = 100
SIZES = {"train": 2000, "val": 2000}


class Part(NamedTuple):
    """Images (n, 1, 28, 28) and labels."""

    images: Tensor
    labels: Tensor


class Settings(NamedTuple):
    """One value per parameter tensor of the network, and one for the loss."""

    lr: list[Any]
    momentum: list[Any]
    weight_decay: list[Any]
    label_smoothing: Any


def network(seed: int) -> nn.Sequential:
    """Return a network of three layers, that is six parameter tensors, with weights that the seed decides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = (nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(784, 10))


def batches(part: Part, seed: int, steps: int) -> list[Part]:
    """Return the batches of all steps; the seed decides their order."""
    draw = torch.Generator().manual_seed(seed)
    epochs = -(-steps * BATCH // len(part.labels))
    order = torch.cat([torch.randperm(len(part.labels), generator=draw) for _ in range(epochs)])
    return [Part(part.images[these], part.labels[these]) for these in order[: steps * BATCH].view(steps, BATCH)]


def train(model: nn.Module, data: list[Part], settings: Settings) -> nn.Module:
    """Take a step on every batch, and return the trained model."""
    lr, momentum, weight_decay, smoothing = settings
    groups = [
        {"params": [p], "lr": lr[i], "momentum": momentum[i], "weight_decay": weight_decay[i]}
        for i, p in enumerate(model.parameters())
    ]
    optimizer = torch.optim.SGD(groups)
    for images, labels in data:
        loss = F.cross_entropy(model(images), labels, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, part: Part) -> float:
    """In percent."""
    return 100 * (model(part.images).argmax(1) == part.labels).double().mean().item()


def load(root: Path | None) -> dict[str, Part]:
    """Return FashionMNIST, or scikit-learn's digits where there is no folder: a small training and validation set."""
    import _data

    if root is None:
        images, labels = _data.digits()
        images = F.interpolate(images[:, None].float() / 16, size=28)
        sizes = {"train": 600, "val": 600}
    else:
        parts = _data.fashion_mnist(root)
        images, labels = torch.cat(parts[::2])[:, None].float() / 255, torch.cat(parts[1::2])
        sizes = SIZES
    images = (images - 0.3) / 0.3
    bounds = {"train": slice(sizes["train"]), "val": slice(sizes["train"], sizes["train"] + sizes["val"])}
    bounds["test"] = slice(-10_000 if root else sizes["train"] + sizes["val"], None)  # the last are FashionMNIST's own
    return {name: Part(images[these], labels[these]) for name, these in bounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with FashionMNIST/; without it: digits")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the batches")
    parser.add_argument("--smoke", action="store_true", help="five steps")
    args = parser.parse_args()
    data = load(args.data)
    settings = Settings([0.1] * 6, [0.9] * 6, [5e-4] * 6, 0.0)
    model = train(network(args.seed), batches(data["train"], args.seed, 5 if args.smoke else STEPS), settings)
    print(f"test accuracy: {accuracy(model, data['test']):.2f} %")


if __name__ == "__main__":
    main()
