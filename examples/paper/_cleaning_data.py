"""The data of hyper_cleaning.py: class-balanced parts, half of the training labels wrong."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import _data
import torch
from torch import Tensor

SCALE = {"mnist": 1.0, "fashion_mnist": 0.5, "digits": 1.0}  # of pixels from 0 to 1: one rate suits all sets, see load


class Part(NamedTuple):
    """Images (n, pixels) and labels."""

    images: Tensor
    labels: Tensor


class Data(NamedTuple):
    """The three parts, and which training labels are wrong."""

    train: Part
    val: Part
    test: Part
    wrong: Tensor


def load(name: str, root: Path | None) -> Part:
    if name == "digits":
        images, labels = _data.digits()
    else:
        assert root is not None
        train_images, train_labels, test_images, test_labels = getattr(_data, name)(root)
        images, labels = torch.cat((train_images, test_images)), torch.cat((train_labels, test_labels))
    # The largest eigenvalue of the covariance bounds the rates: 5.4 for MNIST, 20 for unscaled FashionMNIST.
    return Part(images.flatten(1).float() / images.max() * SCALE[name], labels)


def split(whole: Part, per_class: int, seed: int, device: torch.device) -> Data:
    """Draw class-balanced training and validation sets, and replace half of the training labels by wrong ones."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(whole.labels), generator=generator)
    by_class = [order[whole.labels[order] == label] for label in range(10)]
    bounds = (0, per_class, 2 * per_class, len(order))
    train, val, test = (
        Part(whole.images[chosen], whole.labels[chosen])
        for low, high in itertools.pairwise(bounds)
        for chosen in [torch.cat([samples[low:high] for samples in by_class])]
    )
    size = len(train.labels)
    wrong = torch.zeros(size, dtype=torch.bool)
    wrong[torch.randperm(size, generator=generator)[: size // 2]] = True
    shift = torch.randint(1, 10, (size,), generator=generator)  # never 0 mod 10: another class for certain
    train = train._replace(labels=torch.where(wrong, (train.labels + shift) % 10, train.labels))
    mean = train.images.mean(0)  # without it the largest eigenvalue of the Hessian is ten times as large
    parts = (Part((part.images - mean).to(device), part.labels.to(device)) for part in (train, val, test))
    return Data(*parts, wrong.to(device))
