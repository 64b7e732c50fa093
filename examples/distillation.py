r"""Distil a data set into ten images: where alpha must stay 0.

x are ten images, one per class, and y a linear classifier that is fitted to them. They are to be such that whoever fits
a classifier to the ten images, from any start, gets one that is good on the whole training set:

    min over x of  F(y) = 1/2 mean over the training set of |image y - label|^2 + lambda/2 |y|^2,
    where y minimises  f(x, y) = 1/2 sum over the ten images of |x_i y - label_i|^2

Ten equations per class leave most directions of y open. BDA solves the *optimistic* problem: among the minimisers of f,
y may be chosen for the sake of F. That is right where y_K itself is used. Here it is wrong: the ten images are handed
on, and the next user fits y by the lower loss alone. Images that are perfect for the optimistic problem are easy to
write down, `optimistic` does it, and they teach that user next to nothing.

    python examples/distillation.py                     (scikit-learn's digits)
    python examples/distillation.py --data DIR          (MNIST)

Every number is the test accuracy of a classifier that was fitted to the ten images alone, from a start of its own.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import _data
import torch
import torch.nn.functional as F
from _run import arguments, provenance, wait_while_paused, write_json
from torch import Tensor

import bda_optim as bda

# --- settings ---------------------------------------------------------------------------------------------------------

TRAINING = 10_000  # images of MNIST; 1000 of the digits
DECAY = 1e-2  # lambda
STEPS = 50  # K
ITERATIONS = 200  # of Adam on x
X_LR = 0.02
SIZES = (1.0, 10.0)  # of the random images that are made optimal for the optimistic problem
FRESH = 5  # starts that judge
METHODS = {"alpha = 0": 0.0, "alpha_k = 1/k": 1.0, "alpha_k = 10/k": 10.0}


class Data(NamedTuple):
    """The training set as its second moments, which are all that F needs, and the test set."""

    gram: Tensor  # mean of image' image, (pixels, pixels)
    cross: Tensor  # mean of image' label, (pixels, 10)
    test_images: Tensor
    test_labels: Tensor
    upper_lr: float  # 1 / L_F


def load(root: Path | None) -> Data:
    if root is None:
        images, labels = _data.digits()
        parts = images[:1000], labels[:1000], images[1000:], labels[1000:]
    else:
        parts = _data.mnist(root)
    images, labels, test_images, test_labels = parts
    pixels = images[:TRAINING].flatten(1).double() / images.max()
    mean = pixels.mean(0)
    scale = (pixels - mean).square().sum(1).mean().sqrt()  # the mean square norm of an image becomes 1
    pixels = (pixels - mean) / scale
    targets = F.one_hot(labels[:TRAINING], 10).double() - 0.1
    test = (test_images.flatten(1).double() / images.max() - mean) / scale
    gram = pixels.T @ pixels / len(pixels)
    upper_lr = 1 / (torch.linalg.matrix_norm(gram, 2).item() + DECAY)
    return Data(gram, pixels.T @ targets / len(pixels), test, test_labels, upper_lr)


# --- the problem ------------------------------------------------------------------------------------------------------


def lower(y: Tensor, x: Tensor, batch: Data) -> Tensor:
    return (x @ y - (torch.eye(10, dtype=y.dtype) - 0.1)).square().sum() / 2


def upper(y: Tensor, x: Tensor, batch: Data) -> Tensor:
    """Return F without its constant."""
    return ((batch.gram @ y - 2 * batch.cross) * y).sum() / 2 + DECAY / 2 * y.square().sum()


def fresh_start(data: Data, seed: int) -> Tensor:
    """Return the usual random weights, of the size 1 / sqrt(pixels)."""
    pixels = len(data.gram)
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(pixels, 10, generator=draw, dtype=torch.float64) / pixels**0.5


def fit(x: Tensor, data: Data, y0: Tensor, alpha: Any = 0.0) -> Tensor:
    """Return y_K, with the rate 1 / L_f that belongs to x."""
    lr = 1 / torch.linalg.matrix_norm(x.detach(), 2).square().item()
    options = {"steps": STEPS, "lr": lr, "upper_lr": data.upper_lr, "alpha": alpha, "batches": [data] * STEPS}
    return bda.rollout(lower, upper if alpha else None, y0, x, **options)


def distil(data: Data, c: float, seed: int, iterations: int) -> Tensor:
    """Return x after Adam on F(y_K(x)), with another start y_0 in every iteration."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(10, len(data.gram), generator=draw, dtype=torch.float64) / len(data.gram) ** 0.5
    x.requires_grad_()
    optimizer = torch.optim.Adam([x], lr=X_LR)
    alpha = bda.harmonic(c) if c else 0.0
    for iteration in range(iterations):
        wait_while_paused()
        optimizer.zero_grad()
        y = fit(x, data, fresh_start(data, 10_000 * (seed + 1) + iteration), alpha)
        upper(y, x, data).backward()
        optimizer.step()
    return x.detach()


def optimistic(data: Data, seed: int, size: float) -> tuple[Tensor, Tensor]:
    """Return images for which the best classifier of all, y*, minimises f, so that phi(x) = F(y*), and y* itself.

    That is so for all x with x y* = labels. This one is the closest to random images of the given size (MNIST's is 1).
    """
    ridge = data.gram + DECAY * torch.eye(len(data.gram), dtype=torch.float64)
    best = torch.linalg.solve(ridge, data.cross)
    x = size * distil(data, 0.0, seed, 0)
    targets = torch.eye(10, dtype=torch.float64) - 0.1
    return x + (targets - x @ best) @ torch.linalg.pinv(best, rtol=1e-10), best


# --- what is reported -------------------------------------------------------------------------------------------------


def accuracy(y: Tensor, data: Data) -> float:
    """In percent."""
    return 100 * ((data.test_images @ y).argmax(1) == data.test_labels).double().mean().item()


@torch.no_grad()
def judge(x: Tensor, data: Data) -> list[float]:
    """Return the accuracy of classifiers that were fitted to the ten images alone, from fresh starts."""
    return [round(accuracy(fit(x, data, fresh_start(data, 1 + number)), data), 2) for number in range(FRESH)]


def table(results: dict[str, Any]) -> str:
    lines = ["| ten images | test accuracy from fresh starts, % |", "|---|---:|"]
    lines += [f"| {row['images']} | {min(row['fresh']):.1f} to {max(row['fresh']):.1f} |" for row in results["rows"]]
    lines.append(f"| (the classifier y* itself) | {results['best']:.1f} |")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> dict[str, Any]:
    data = load(args.data)
    rows = []
    seed = args.seeds[0]
    for name, c in METHODS.items():
        begin = time.process_time()
        x = distil(data, c, seed, args.iterations)
        rows.append({"images": name, "fresh": judge(x, data), "seconds": round(time.process_time() - begin, 1)})
    for size in SIZES:
        x, best = optimistic(data, seed, size)
        rows.append({"images": f"optimistically optimal, random images of size {size:g}", "fresh": judge(x, data)})
    settings = {"steps": STEPS, "iterations": args.iterations, "x_lr": X_LR, "decay": DECAY, "seed": seed}
    settings["dataset"] = "digits" if args.data is None else "mnist"
    return {"settings": settings, **provenance(), "rows": rows, "best": accuracy(best, data)}


def main() -> None:
    parser = arguments("Data distillation: the case in which alpha must stay 0.", "distillation")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with MNIST/; without it: digits")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="upper iterations")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(iterations=5)
    args = parser.parse_args()
    if len(args.seeds) != 1 or args.resume:
        parser.error("this script takes one seed, and no --resume: it runs for a minute")
    results = run(args)
    write_json(args.out / "distillation.json", results)
    print(f"{table(results)}\n\nWritten: {args.out / 'distillation'}.json")


if __name__ == "__main__":
    main()
