r"""The adjoint of one step in mixed mode: forward over reverse, instead of reverse over reverse.

Let ``y+ = U(y, x, g)`` with ``g = grad_y f(y, x)``. The pull-back of a cotangent v needs the second derivatives of f
only through ``w = (dU/dg)^T v``, as the products

.. math:: \nabla_{yy}^2 f \, w, \qquad \nabla_{xy}^2 f \, w,

which are the derivative of the gradient of f with respect to (y, x) along (w, 0): one forward-mode sweep over one
gradient, with no graph of a gradient to keep. The upper loss F is treated alike.

Reference: Kemaev et al., "Scalable Meta-Learning via Mixed-Mode Differentiation", ICML 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._adjoints.base import as_leaves, fresh, pull_back
from .._step.gradients import both_gradients, no_gradient
from .._step.objective import Loss
from .._step.step import BDAStep
from .._support.slots import fill
from .._support.tree import replace_tensors, tensors
from .._support.types import InnerState, Item


def pull_mixed(
    step: BDAStep,
    state: InnerState,
    hyper: Sequence[Tensor],
    item: Item,
    resolve: Callable[[Sequence[Tensor]], Sequence[Any]],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Pull cotangents of the state after a step back to the state before it, and to hyper.

    Args:
        step: The step.
        state: The state before it.
        hyper: The tensors of the slots; gradients are given for those that require grad.
        item: The item of the step.
        resolve: Returns the groups' settings, given the tensors of the slots.
        cotangents: One per tensor of the state; None is zero.
    """
    leaves = fresh(tensors(state))
    given = as_leaves(hyper)
    with torch.enable_grad():
        now = replace_tensors(state, leaves)
        settings = resolve(given)
        points = step.update.points(now, settings)
        plain = fresh(points)
        f, big_f, buffers = step.losses(plain, now.buffers, [h.detach() for h in given], item, settings)
        both = both_gradients(f, big_f, plain, item.k, tasks=step.update.tasks)
        lower, upper = ([None if g is None else g.detach().requires_grad_() for g in grads] for grads in both)
        new = step.update(now, lower, upper, settings, step.hyper.fill(given))
    grads = [g for g in (*lower, *upper) if g is not None]
    pulled = pull_back(tensors(new._replace(buffers=buffers)), [*leaves, *given, *grads], cotangents)
    totals = pulled[: len(leaves) + len(given)]
    seeds = iter(pulled[len(leaves) + len(given) :])
    directions = [[None if g is None else next(seeds) for g in level] for level in (lower, upper)]
    at_points: list[Tensor | None] = list(no_gradient(points))
    for loss, along in zip((step.lower, step.upper), directions, strict=True):
        if not step.constant_gradients and loss is not None and any(w is not None for w in along):
            by_points, by_hyper = _second(step, loss, plain, now.buffers, given, item, along)
            at_points = add(at_points, by_points)
            totals = add(totals, [*no_gradient(leaves), *by_hyper])
    return add(totals, pull_back(points, [*leaves, *given], at_points))


def _second(
    step: BDAStep,
    loss: Loss,
    points: Sequence[Tensor],
    buffers: tuple[Tensor, ...],
    hyper: Sequence[Tensor],
    item: Item,
    directions: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the second derivatives of a loss along a direction of the points: by points, and by hyper."""
    with torch.enable_grad(), forward_ad.dual_level():
        duals = [p if w is None else forward_ad.make_dual(p, w) for p, w in zip(points, directions, strict=True)]
        value, _ = step.objective(loss, duals, buffers, hyper, fill(item.batch, hyper))
        wanted = [h for h in hyper if h.requires_grad]
        grads = torch.autograd.grad(value.sum(), [*duals, *wanted], allow_unused=True)
        tangents = [None if g is None else forward_ad.unpack_dual(g).tangent for g in grads]
    cross = iter(tangents[len(duals) :])
    return tangents[: len(duals)], [next(cross) if h.requires_grad else None for h in hyper]


def add(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add tensors pairwise; None is zero."""
    return [b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)]
