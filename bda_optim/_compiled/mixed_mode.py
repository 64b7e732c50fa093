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

from .._adjoints.stages import pull_in_stages
from .._step.gradients import Grads, both_gradients
from .._step.objective import Buffers
from .._step.step import BDAStep
from .._support.slots import fill
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

    def gradients(
        points: Sequence[Tensor], buffers: Buffers, constants: Sequence[Tensor], settings: Any
    ) -> tuple[tuple[Grads, Grads], Buffers]:
        f, big_f, kept = step.losses(points, buffers, constants, item, settings)
        return both_gradients(f, big_f, points, item.k, tasks=step.update.tasks), kept

    def product(level: str, points: Any, buffers: Buffers, given: Any, along: Grads) -> tuple[Grads, Grads]:
        return _second(step, level, points, buffers, given, item, along)

    return pull_in_stages(step, state, hyper, resolve, gradients, product, cotangents)


def _second(
    step: BDAStep,
    level: str,
    points: Sequence[Tensor],
    buffers: tuple[Tensor, ...],
    hyper: Sequence[Tensor],
    item: Item,
    directions: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the second derivatives of a loss along a direction of the points: by points, and by hyper."""
    with torch.enable_grad(), forward_ad.dual_level():
        duals = [p if w is None else forward_ad.make_dual(p, w) for p, w in zip(points, directions, strict=True)]
        value, _ = step.loss(level, duals, buffers, hyper, fill(item.batch, hyper), item.k)
        wanted = [h for h in hyper if h.requires_grad]
        grads = torch.autograd.grad(value.sum(), [*duals, *wanted], allow_unused=True)
        tangents = [None if g is None else forward_ad.unpack_dual(g).tangent for g in grads]
    cross = iter(tangents[len(duals) :])
    return tangents[: len(duals)], [next(cross) if h.requires_grad else None for h in hyper]
