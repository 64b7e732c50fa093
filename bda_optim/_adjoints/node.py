"""A rollout as one node of the autograd graph, whose backward pass replays steps from stored states.

`torch.utils.checkpoint` cannot serve: around steps that take gradients it replays a segment once per inner gradient
(640 step evaluations instead of 64 at K = 64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._support.tensors import is_differentiable
from .._support.torch_private import version_of
from .._support.tree import replace_tensors, tensors
from .base import Items, Result, Step, changed_in_place
from .replay import Replay


def replayed(
    step: Step,
    state: Any,
    hyper: tuple[Tensor, ...],
    items: Items,
    *,
    starts: Sequence[int] | None,
    slots: int = 0,
    **options: Any,
) -> Result:
    """Run the loop as one node of the graph; the arguments are those of `Replay`."""
    replay = Replay(step, state, hyper, items, starts=starts, slots=slots, **options)
    leaves: tuple[Tensor, ...] = Replayed.apply(replay, *tensors(state), *hyper)  # type: ignore[no-untyped-call]
    return replace_tensors(replay.last, leaves), replay.records


def without_graph(step: Step, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
    """Run the loop where nothing that was passed requires grad; in grad mode a captured tensor that does raises."""
    inspect = torch.is_grad_enabled()
    records = []
    with torch.no_grad():
        for item in items:
            if inspect:
                state, record, _ = step.record(state, hyper, item)
                inspect = False
            else:
                state, record = step(state, hyper, item)
            records.append(record)
    return state, records


class Replayed(torch.autograd.Function):
    """The K steps as one node of the graph: ``Replayed.apply(replay, *tensors_of_the_state, *hyper)``."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Run the first sweep."""
        ctx.replay, ctx.leaves, ctx.versions = replay, leaves, [version_of(t) for t in leaves]
        ctx.save_for_backward(*leaves)
        ctx.set_materialize_grads(False)
        outputs = tuple(t.clone() for t in replay.sweep(leaves))
        ctx.mark_non_differentiable(*(t for t in outputs if not is_differentiable(t)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay; on the tape if the caller wants a graph of the backward pass."""
        replay: Replay = ctx.replay
        for name, tensor, version in zip(replay.names, ctx.leaves, ctx.versions, strict=True):
            if version_of(tensor) != version:
                raise RuntimeError(changed_in_place(name, tensor))
        leaves = ctx.saved_tensors  # a second backward without retain_graph raises here
        if torch.is_grad_enabled():
            return None, *replay.pull_on_tape(leaves, cotangents)
        return None, *replay.pull(leaves, list(cotangents))
