r"""The aggregated step of Bi-level Descent Aggregation (BDA).

.. math:: y_{k+1} = y_k - \big[ \alpha_k s_u \nabla_y F + (1 - \alpha_k) (y_k - \mathrm{prox}_{s_l g}(y_k - D_k)) \big]

where ``D_k`` is what the rule makes of the lower gradient (plain SGD: ``s_l grad f``). The weight ``alpha_k`` belongs
to the UPPER level, with and without a prox. (The paper's nonsmooth appendix has it in front of the lower direction; as
``alpha_k -> 0`` the upper level would win and the stated limit would not hold, so that is a slip.)

Reference: Liu et al., "A Generic First-Order Algorithmic Framework for Bi-Level Programming Beyond Lower-Level
Singleton", ICML 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._support.types import Move, Scalar

_NOT_PLAIN = (Tensor, list)  # of a weight: learned, or one per parameter; a tuple is looked through fastest


def weight(alpha: Any, k: Any) -> Any:
    """Return ``alpha_k``: a number, a tensor or a list of them as it is, a schedule at ``k``.

    Raises:
        ValueError: If a plain number lies outside [0, 1).

    >>> weight(0.3, 7)
    0.3
    """
    value = alpha(k) if callable(alpha) else alpha
    if not isinstance(value, _NOT_PLAIN) and not 0 <= value < 1:
        raise ValueError(
            f"`alpha` must lie in [0, 1) at every step; got {value} at k={k}. Use `harmonic(0.5)` or clip it."
        )
    return value


def is_zero(alpha: Any) -> bool:
    """Whether the upper level is plainly absent; a tensor never is, since it may be learned."""
    return not isinstance(alpha, _NOT_PLAIN) and alpha == 0


def aggregate(
    y: Tensor,
    move: Move | None,
    upper_grad: Tensor | None,
    *,
    alpha: Scalar,
    upper_lr: Scalar,
    prox: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the next iterate of one parameter.

    Args:
        y: The iterate.
        move: The rule's displacement from the lower gradient; None where the lower loss does not depend on `y`.
        upper_grad: The gradient of the upper loss; None where it does not depend on `y`.
        alpha: The weight of the upper direction in this step.
        upper_lr: The rate s_u of the upper direction.
        prox: The proximal map of the lower level's nonsmooth term, its step already bound.

    >>> y, g = torch.tensor([1.0]), torch.tensor([2.0])
    >>> aggregate(y, Move(g, 0.1), torch.tensor([10.0]), alpha=0.5, upper_lr=0.01)
    tensor([0.8500])
    """
    if is_zero(alpha):
        moved = y if move is None else _subtract(y, move)
        return moved if prox is None else prox(moved)
    if prox is not None:
        lower: Tensor | None = y - prox(y if move is None else _subtract(y, move))
    else:
        lower = None if move is None else move.displacement()
    total = None if lower is None else (1 - alpha) * lower
    if upper_grad is not None:
        upper = alpha * upper_lr * upper_grad
        total = upper if total is None else upper + total
    return y if total is None else y - total


def _subtract(y: Tensor, move: Move) -> Tensor:
    if isinstance(move.scale, Tensor):
        return y - move.displacement()
    return torch.add(y, move.direction, alpha=-move.scale)
