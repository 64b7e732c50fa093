r"""The aggregated step of Bi-level Descent Aggregation (BDA).

.. math:: y_{k+1} = y_k - \big[ \alpha_k s_u \nabla_y F + (1 - \alpha_k) (y_k - \mathrm{prox}_{s_l g}(y_k - D_k)) \big]

where ``D_k`` is what the rule makes of the lower gradient (plain SGD: ``s_l grad f``). The weight ``alpha_k`` belongs
to the UPPER level, with and without a prox. The paper's nonsmooth appendix puts it in front of the lower direction.
That is a slip: as ``alpha_k -> 0`` the upper level would win, and the stated limit would not hold.

Reference: Liu et al., "A Generic First-Order Algorithmic Framework for Bi-Level Programming Beyond Lower-Level
Singleton", ICML 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._support.types import Move, Scalar, Settings

_NOT_PLAIN = (Tensor, list)  # a weight that is learned, or one per parameter


def at_step(settings: Settings, k: Any) -> Settings:
    """Return settings at step k, with the values of schedules of `alpha`, `lr` and `upper_lr`.

    Raises:
        ValueError: If a weight lies outside [0, 1), or a rate is negative.

    >>> at_step({"alpha": lambda k: 0.5 / k, "lr": 0.1, "upper_lr": None}, 2)
    {'alpha': 0.25, 'lr': 0.1, 'upper_lr': None}
    """
    alpha = weight(settings["alpha"], k)
    changed = {} if alpha is settings["alpha"] else {"alpha": alpha}
    for name in ("lr", "upper_lr"):
        if callable(settings[name]):
            changed[name] = rate(settings[name], name, k)
    return {**settings, **changed} if changed else settings


def weight(alpha: Any, k: Any) -> Any:
    """Return ``alpha_k``: the value of a schedule at ``k``; a number, a tensor or a list of them as it is.

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


def rate(schedule: Callable[[Any], Any], name: str, k: Any) -> Any:
    """Return the value of a schedule of rates at step k."""
    value = schedule(k)
    if not isinstance(value, _NOT_PLAIN) and not value >= 0:
        raise ValueError(
            f"`{name}` must be at least 0 at every step; got {value} at k={k}. Return a rate for every k = 1, 2, ...."
        )
    return value


def is_zero(alpha: Any) -> bool:
    """Whether the upper level is absent; a tensor never counts as 0, since it may be learned."""
    return not isinstance(alpha, _NOT_PLAIN) and alpha == 0


def needs_upper(settings: Sequence[Settings], upper: Any, k: Any, how: str = "Pass it, or set alpha=0.0.") -> bool:
    """Whether step k evaluates the upper loss, by its settings.

    Raises:
        ValueError: If it does, but there is no upper loss; `how` says where to pass it.
    """
    if all(is_zero(chosen["alpha"]) for chosen in settings):
        return False
    if upper is None:
        raise ValueError(f"`alpha` is not 0 at step k={k}, so the step needs the upper loss; got upper=None. {how}")
    return True


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
        move: The rule's displacement from the lower gradient; None if the lower loss does not depend on `y`.
        upper_grad: The gradient of the upper loss; None if it does not depend on `y`.
        alpha: The weight of the upper direction in this step.
        upper_lr: The rate s_u of the upper direction.
        prox: The proximal map of the lower level's nonsmooth term, as a function of y alone.

    >>> y, g = torch.tensor([1.0]), torch.tensor([2.0])
    >>> aggregate(y, Move(g, 0.1), torch.tensor([10.0]), alpha=0.5, upper_lr=0.01)
    tensor([0.8500])
    """
    if is_zero(alpha):
        moved = y if move is None else _subtract(y, move)
        return moved if prox is None else prox(moved)
    total = displacement(y, move, upper_grad, alpha=alpha, upper_lr=upper_lr, prox=prox)
    return y if total is None else y - total


def displacement(
    y: Tensor,
    move: Move | None,
    upper_grad: Tensor | None,
    *,
    alpha: Scalar,
    upper_lr: Scalar,
    prox: Callable[[Tensor], Tensor] | None = None,
) -> Tensor | None:
    """Return what a step subtracts from `y`, without the cancellation of ``y - (y - total)``; None if nothing.

    The arguments are those of `aggregate`.

    >>> y, g = torch.tensor([1.0]), torch.tensor([2.0])
    >>> displacement(y, Move(g, 0.1), torch.tensor([10.0]), alpha=0.5, upper_lr=0.01)
    tensor([0.1500])
    """
    if prox is not None:
        lower: Tensor | None = y - prox(y if move is None else _subtract(y, move))
    else:
        lower = None if move is None else move.displacement()
    if is_zero(alpha):
        return lower
    total = None if lower is None else (1 - alpha) * lower
    if upper_grad is None:
        return total
    upper = alpha * upper_lr * upper_grad
    return upper if total is None else upper + total


def _subtract(y: Tensor, move: Move) -> Tensor:
    if isinstance(move.scale, Tensor):
        return y - move.displacement()
    return torch.add(y, move.direction, alpha=-move.scale)
