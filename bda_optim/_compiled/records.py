"""The losses of the steps that share a compiled call: one tensor per level, instead of two for each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from .._support.types import Record


class Losses(NamedTuple):
    """The losses of some steps.

    Attributes:
        lower: The lower losses, one per step.
        upper: The upper losses of those steps that evaluated it; None if none did.
        evaluated: Which steps did.
    """

    lower: Tensor
    upper: Tensor | None
    evaluated: tuple[bool, ...]

    def records(self) -> Iterator[Record]:
        """Yield the record of each step."""
        upper = iter(() if self.upper is None else self.upper.unbind(0))
        for lower, there in zip(self.lower.unbind(0), self.evaluated, strict=True):
            yield Record(lower, next(upper) if there else None)


def joined_losses(records: Sequence[Record]) -> list[Tensor | None]:
    """Return the lower losses of some steps, and the upper ones that there are, detached."""
    lower = [record.lower.detach() for record in records]
    upper = [record.upper.detach() for record in records if record.upper is not None]
    return [torch.stack(lower), torch.stack(upper) if upper else None]


def losses_of(records: Sequence[Record]) -> Losses:
    """Return the losses of steps that ran uncompiled."""
    lower, upper = joined_losses(records)
    assert lower is not None
    return Losses(lower, upper, tuple(record.upper is not None for record in records))


class JoinedRecords(Sequence[Record]):
    """The records of all steps; each is taken out of its block when it is asked for.

    Attributes:
        blocks: The losses of the steps, in order.
    """

    def __init__(self, blocks: Sequence[Losses]) -> None:
        self.blocks = blocks
        self._each: list[Record] | None = None

    def _records(self) -> list[Record]:
        if self._each is None:
            self._each = [record for block in self.blocks for record in block.records()]
        return self._each

    def __len__(self) -> int:
        return sum(len(block.evaluated) for block in self.blocks)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._records()[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records())
