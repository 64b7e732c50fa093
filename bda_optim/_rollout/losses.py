"""The losses of a rollout, and whether they are finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._compiled.records import JoinedRecords, Losses
from .._support.types import Record


class Trace(NamedTuple):
    """The losses of the K steps, detached, on the device: K numbers, or K x B with B tasks.

    Attributes:
        lower: The lower loss at y_0, ..., y_{K-1}.
        upper: The upper loss there; NaN at steps that did not evaluate it, None if no step did.
    """

    lower: Tensor
    upper: Tensor | None = None

    def __repr__(self) -> str:
        """Show the number of steps, and the first and the last losses."""
        ends = [f"{name} {_shown(loss)}" for name, loss in zip(self._fields, self, strict=True) if loss is not None]
        return f"Trace(K={len(self.lower)}, {', '.join(ends)})"


def _shown(losses: Tensor) -> str:
    """Return the means over tasks of the first and of the last losses."""
    if losses.is_meta:
        return "on meta"
    first, last = (losses[k].mean().item() for k in (0, -1))
    return f"{first:.4g} ... {last:.4g}"


def trace_of(records: Sequence[Record], tasks: int | None) -> Trace:
    """Stack the losses of all steps."""
    shape = () if tasks is None else (tasks,)
    if isinstance(records, JoinedRecords):
        return _trace_of_blocks(records.blocks, shape)
    lower = torch.stack([_shaped(record.lower, shape) for record in records])
    if all(record.upper is None for record in records):
        return Trace(lower, None)
    return Trace(lower, _with_gaps([None if r.upper is None else _shaped(r.upper, shape) for r in records]))


def _shaped(loss: Tensor, shape: tuple[int, ...]) -> Tensor:
    return loss if loss.shape == shape else loss.reshape(shape)


def _trace_of_blocks(blocks: Sequence[Losses], shape: tuple[int, ...]) -> Trace:
    """Join the losses of steps that shared calls."""
    lower = _joined([block.lower.reshape(-1, *shape) for block in blocks])
    upper = [block.upper.reshape(-1, *shape) for block in blocks if block.upper is not None]
    if not upper:
        return Trace(lower, None)
    evaluated = [there for block in blocks for there in block.evaluated]
    if all(evaluated):
        return Trace(lower, _joined(upper))
    rows = iter(_joined(upper).unbind(0))
    return Trace(lower, _with_gaps([next(rows) if there else None for there in evaluated]))


def _with_gaps(losses: Sequence[Tensor | None]) -> Tensor:
    """Stack losses; those that were not evaluated are NaN."""
    skipped = torch.full_like(next(loss for loss in losses if loss is not None), torch.nan)
    return torch.stack([skipped if loss is None else loss for loss in losses])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def all_finite(records: Sequence[Record], params: Sequence[Tensor], also: Sequence[Tensor] = ()) -> bool:
    """Whether all losses and the last iterate are finite: the only look at values, one after all steps.

    Args:
        records: The losses.
        params: The last iterate.
        also: Flags of other conditions, to be looked at by the way.
    """
    if not params or params[0].is_meta:
        return True
    rows = [block[:2] for block in records.blocks] if isinstance(records, JoinedRecords) else records
    losses: dict[torch.device, list[Tensor]] = {}
    for loss in (loss for row in rows for loss in row if loss is not None):
        losses.setdefault(loss.device, []).append(loss)
    joined = [_vector(own) for own in losses.values()]
    small = sum(p.numel() for p in params) <= _SMALL and not also
    if small and len(joined) == 1 and all(p.device == joined[0].device for p in params):
        return bool(torch.isfinite(torch.cat([*joined, *(p.detach().reshape(-1) for p in params)])).all())
    flags = [torch.isfinite(value).all() for value in (*joined, *params)]
    return bool(torch.stack([flag.to(params[0].device) for flag in (*flags, *also)]).all())


def _vector(losses: Sequence[Tensor]) -> Tensor:
    """Return all losses of one device as a vector."""
    scalars = not any([loss.dim() for loss in losses])
    return torch.stack(list(losses)) if scalars else torch.cat([loss.reshape(-1) for loss in losses])


_SMALL = 10_000
"""Parameters with up to so many numbers are copied, to be looked at together with the losses."""


def first_bad_loss(records: Sequence[Record]) -> tuple[int, str] | None:
    """Return the step of the first loss that is not finite, and its level."""
    for k, record in enumerate(records, 1):
        for level, loss in zip(("lower", "upper"), record, strict=True):
            if loss is not None and not bool(torch.isfinite(loss).all()):
                return k, level
    return None


def diverged(what: str, records: Sequence[Record]) -> str:
    """Tell of a loop in which `what` is not finite; `records` end at that step."""
    lower = torch.stack([record.lower.reshape(-1).double() for record in records[-_SHOWN:]])
    task = int((~torch.isfinite(lower[-1])).int().argmax())
    listed = ", ".join(f"{loss:.4g}" for loss in lower[:, task].tolist())
    of = f" of task {task}" if lower.shape[1] > 1 else ""
    return (
        f"the inner loop diverged: {what}. Lower `lr` (or `upper_lr`), check the losses for log(0) or 0/0, and look at "
        f"the `trace` of a shorter loop. The last lower losses{of}, up to k={len(records)}: {listed}."
    )


_SHOWN = 5
"""The maximum number of losses in a message."""


def check_finite(records: Sequence[Record], params: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise where a loss or the last iterate is not finite."""
    if all_finite(records, params):
        return
    bad = first_bad_loss(records)
    if bad is not None:
        what = f"the {bad[1]} loss is not finite at step k={bad[0]} of {len(records)}"
        raise FloatingPointError(diverged(what, records[: bad[0]]))
    wrong = ", ".join(f"`{name}`" for name, p in zip(names, params, strict=True) if not torch.isfinite(p).all())
    what = f"the parameters are not finite after the last step, k={len(records)}: {wrong}"
    raise FloatingPointError(diverged(what, records))
