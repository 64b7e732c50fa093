r"""The pull-back of one step in two stages: through the update, then through the gradients of both losses.

Let ``y+ = U(y, x, g)`` with ``g = grad_y f(y, x)``. The cotangent v of y+ is pulled back through U alone, whose graph
is small, with y, x and g as leaves. The second derivatives of f are needed only through ``w = (dU/dg)^T v``, as the
products

.. math:: \nabla_{yy}^2 f \, w, \qquad \nabla_{xy}^2 f \, w .

The upper loss F is treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._step.gradients import Grads, add, no_gradient
from .._step.objective import Buffers
from .._step.step import BDAStep
from .._support.tree import replace_tensors, tensors
from .._support.types import InnerState
from .base import Cotangents, as_leaves, fresh, pull_back

Gradients: TypeAlias = Callable[[Sequence[Tensor], Buffers, Sequence[Tensor], Any], tuple[tuple[Grads, Grads], Buffers]]
"""``gradients(points, buffers, hyper, settings)`` -> both gradients, and the buffers after the step."""

Product: TypeAlias = Callable[[str, Sequence[Tensor], Buffers, Sequence[Tensor], Grads], tuple[Grads, Grads]]
"""``product(level, points, buffers, hyper, directions)`` -> the second derivatives of a loss along directions of the
points: by points, and by hyper."""


def pull_in_stages(
    step: BDAStep,
    state: InnerState,
    hyper: Sequence[Tensor],
    resolve: Callable[[Sequence[Tensor]], Sequence[Any]],
    gradients: Gradients,
    product: Product,
    cotangents: Sequence[Tensor | None],
) -> Cotangents:
    """Pull cotangents of the state after a step back to the state before it, and to hyper.

    Args:
        step: The step.
        state: The state before it.
        hyper: The tensors of the slots; gradients are given for those that require grad.
        resolve: Returns the groups' settings, given the tensors of the slots.
        gradients: Returns the gradients of both losses.
        product: Returns the second-order products of one loss.
        cotangents: One per tensor of the state; None is zero.
    """
    leaves = fresh(tensors(state))
    given = as_leaves(hyper)
    with torch.enable_grad():
        now = replace_tensors(state, leaves)
        settings = resolve(given)
        points = step.update.points(now, settings)
        plain = fresh(points)
        both, buffers = gradients(plain, now.buffers, [h.detach() for h in given], settings)
        lower, upper = ([None if g is None else g.detach().requires_grad_() for g in grads] for grads in both)
        new = step.update(now, lower, upper, settings, step.hyper.fill(given))
    grads = [g for g in (*lower, *upper) if g is not None]
    pulled = pull_back(tensors(new._replace(buffers=buffers)), [*leaves, *given, *grads], cotangents)
    del new
    totals = pulled[: len(leaves) + len(given)]
    seeds = iter(pulled[len(leaves) + len(given) :])
    directions = [[None if g is None else next(seeds) for g in level] for level in (lower, upper)]
    at_points: Cotangents = list(no_gradient(points))
    for level, along in zip(("lower", "upper"), directions, strict=True):
        if not step.constant_gradients and any(w is not None for w in along):
            by_points, by_hyper = product(level, plain, now.buffers, given, along)
            at_points = add(at_points, by_points)
            totals = add(totals, [*no_gradient(leaves), *by_hyper])
    return add(totals, pull_back(points, [*leaves, *given], at_points))
