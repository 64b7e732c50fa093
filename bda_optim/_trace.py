"""The losses of a rollout, and whether they are finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._types import Record


class Trace(NamedTuple):
    """The losses of the K steps, detached, on the device: K numbers, or K x B with B tasks.

    Attributes:
        lower: The lower loss at y_0, ..., y_{K-1}.
        upper: The upper loss there; NaN at steps that did not evaluate it, None if no step did.
    """

    lower: Tensor
    upper: Tensor | None


def trace_of(records: Sequence[Record], tasks: int | None) -> Trace:
    """Stack the losses of all steps."""
    shape = () if tasks is None else (tasks,)
    lower = torch.stack([record.lower.reshape(shape) for record in records])
    if all(record.upper is None for record in records):
        return Trace(lower, None)
    skipped = torch.full_like(lower[0], torch.nan)
    return Trace(lower, torch.stack([skipped if r.upper is None else r.upper.reshape(shape) for r in records]))


def check_finite(records: Sequence[Record], params: Sequence[Tensor]) -> None:
    """Raise where a loss or the last iterate is not finite: the only look at values, one after all steps."""
    if not params or params[0].is_meta:
        return
    names = [(k, "lower", r.lower) for k, r in enumerate(records, 1)]
    names += [(k, "upper", r.upper) for k, r in enumerate(records, 1) if r.upper is not None]
    sums = torch.stack([loss.sum() for _, _, loss in names])
    whole = torch.stack([torch.isfinite(p).all().to(params[0].device) for p in params]).all()
    if bool(torch.isfinite(sums).all() & whole):
        return
    bad = sorted((k, level) for (k, level, _), ok in zip(names, torch.isfinite(sums).tolist(), strict=True) if not ok)
    if bad:
        what = f"the {bad[0][1]} loss is not finite at step k={bad[0][0]} of {len(records)}"
    else:
        what = f"the parameters are not finite after the last step, k={len(records)}"
    raise FloatingPointError(
        f"the inner loop diverged: {what}. Lower `lr` (or `upper_lr`), check the losses for log(0) or 0/0, and look at "
        "the `trace` of a shorter loop."
    )
