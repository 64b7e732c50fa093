"""Carry the derivatives forward along with the state."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from .._support.tensors import any_requires_grad
from .._support.tree import replace_tensors, tensors
from .base import Items, Result, as_leaves, as_step
from .node import without_graph
from .tangents import Attached, identity, scalars


@dataclasses.dataclass(frozen=True)
class ForwardMode:
    r"""Carry the derivatives forward along with the state: exact, for any K, at a cost that grows with P upper scalars.

    `limit` counts upper scalars: the elements of all tensors that require grad.

    .. math:: \dot y_{k+1} = \partial_y S \, \dot y_k + \partial_x S

    Not recommended for more than a few upper variables: each step costs P tangents, and P copies of the state are kept.
    The tangents of a step share its primal evaluation.

    Reference: Franceschi et al., "Forward and Reverse Gradient-Based Hyperparameter Optimization", ICML 2017.

    Args:
        limit: The maximum number P of scalars that require grad; more is an error.

    >>> import torch
    >>> import bda_optim as bda
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> lower = lambda y, x, batch: 0.5 * (y - x) ** 2
    >>> y = bda.rollout(lower, None, torch.tensor(0.0), x, steps=4, lr=0.5, adjoint=bda.ForwardMode())
    >>> torch.autograd.grad(y, x)[0]
    tensor(0.9375)
    """

    limit: int = 256

    def __call__(self, step: Any, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Run the loop with its tangents, then attach them to the last state."""
        step = as_step(step)
        items = step.units(items)
        if not any_requires_grad((state, hyper)):
            return without_graph(step, state, hyper, items)
        given = [*tensors(state), *hyper]
        inputs = [t for t in given if t.requires_grad]
        size = sum(map(scalars, inputs))
        if size > self.limit:
            raise ValueError(
                f"`ForwardMode` carries one tangent per scalar that requires grad and takes at most {self.limit}; "
                f"got {size}. Use `Checkpointed()`, or raise `limit=` if the memory suffices."
            )
        tangents = identity(given, size)
        count = len(given) - len(hyper)
        leaves = as_leaves(hyper)
        records = []
        for item in items:
            state, record, moved = step.push(state, leaves, item, tangents)
            tangents = moved + tangents[count:]
            records.append(record)
        last: tuple[Tensor, ...] = Attached.apply(  # type: ignore[no-untyped-call]
            tensors(state), tangents[:count], *inputs
        )
        return replace_tensors(state, last), records
