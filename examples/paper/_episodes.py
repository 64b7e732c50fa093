"""The episodes of few_shot.py: images of the data sets, and tasks that are drawn from them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import _data
import torch
from torch import Tensor


class Tasks(NamedTuple):
    """B tasks; every tensor has B in front. Slices are tasks again, so that they can be divided among processes."""

    support: Tensor
    support_labels: Tensor
    query: Tensor
    query_labels: Tensor

    @property
    def count(self) -> int:
        return self.support.shape[0]

    def halves(self, ways: int) -> tuple[Tasks, Tasks]:
        """Return the same tasks with the first and with the second half of the query images of each class."""
        images, labels = (t.unflatten(1, (ways, -1)).chunk(2, 2) for t in (self.query, self.query_labels))
        first, second = ((i.flatten(1, 2), n.flatten(1, 2)) for i, n in zip(images, labels, strict=True))
        return Tasks(self.support, self.support_labels, *first), Tasks(self.support, self.support_labels, *second)

    def part(self, start: int, stop: int) -> Tasks:
        return Tasks(*(tensor[start:stop] for tensor in self))


class Sizes(Protocol):
    """What an episode depends on; few_shot.py's settings have it."""

    @property
    def ways(self) -> int: ...

    @property
    def shots(self) -> int: ...


def draw(images: Tensor, count: int, settings: Sizes, queries: int, seed: int, *, rotate: bool) -> Tasks:
    """Draw tasks from images (classes, images per class, channels, height, width); the same seed, the same tasks."""
    generator = torch.Generator().manual_seed(seed)
    turns = 4 if rotate else 1
    each, found = settings.shots + queries, []
    for _ in range(count):
        classes = torch.randperm(images.shape[0] * turns, generator=generator)[: settings.ways]
        for chosen in classes.tolist():  # a character turned by 90, 180 or 270 degrees is another one
            these = torch.randperm(images.shape[1], generator=generator)[:each]
            found.append(images[chosen // turns, these].rot90(chosen % turns, (-2, -1)))
    stacked = torch.stack(found).unflatten(0, (count, settings.ways)).float() / 255
    support, query = stacked[:, :, : settings.shots], stacked[:, :, settings.shots :]
    labels = (torch.arange(settings.ways).repeat_interleave(n).repeat(count, 1) for n in (settings.shots, queries))
    return Tasks(support.flatten(1, 2), next(labels), query.flatten(1, 2), next(labels))


def made(classes: int = 24) -> dict[str, Tensor]:
    """Images for --smoke: a pattern per class, and noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(classes, 1, 1, 7, 7, generator=generator).repeat_interleave(4, -1).repeat_interleave(4, -2)
    images = 0.7 * patterns + 0.3 * torch.rand(classes, 20, 1, 28, 28, generator=generator)
    parts = (images * 255).to(torch.uint8).split(classes // 3)
    return dict(zip(("train", "val", "test"), parts, strict=True))


OMNIGLOT = {"train": 1100, "val": 100, "test": 423}  # characters, as in MAML


def load(dataset: str, root: Path) -> dict[str, Tensor]:
    """Read the images; Omniglot's characters are divided at random, as in MAML, and not by alphabets."""
    if dataset == "made":
        return made()
    found = getattr(_data, dataset)(root)
    if dataset != "omniglot":
        return found
    characters = torch.cat(list(found.values())).unsqueeze(2)
    order = torch.randperm(len(characters), generator=torch.Generator().manual_seed(0))
    parts = characters[order].split(list(OMNIGLOT.values()))
    return dict(zip(OMNIGLOT, parts, strict=True))
