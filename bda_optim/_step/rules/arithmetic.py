"""The pieces of the rules' equations: differentiable, and never in place.

A scalar is a number or a tensor; `ParameterRule` casts back what a tensor scalar promoted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._support.types import Move, RuleState, Scalar, Settings


def is_on(value: Any) -> bool:
    """Whether a setting takes effect: a tensor always does, since reading its value would synchronise."""
    return isinstance(value, Tensor | list) or value != 0


def add(y: Tensor, x: Tensor, scale: Scalar) -> Tensor:
    """``y + scale x``, by torch.optim's own operation where the scale is a number; a 0-dim y keeps its dtype."""
    return (y + scale * x).to(y.dtype) if isinstance(scale, Tensor) else torch.add(y, x, alpha=scale)


def lerp(old: Tensor, new: Tensor, weight: Scalar) -> Tensor:
    """``(1 - weight) old + weight new``."""
    return old + weight * (new - old) if isinstance(weight, Tensor) else torch.lerp(old, new, weight)


def mean_square(old: Tensor, grad: Tensor, beta: Scalar) -> Tensor:
    """``beta old + (1 - beta) grad^2``."""
    if isinstance(beta, Tensor):
        return beta * old + (1 - beta) * grad * grad
    return torch.addcmul(old * beta, grad, grad, value=1 - beta)


def root(x: Tensor) -> Tensor:
    """``sqrt(x)`` with the derivative 0 at 0, and 0 for an x that rounding made negative; NaN stays NaN."""
    zero = x <= 0
    return x.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def rms(x: Tensor) -> Tensor:
    """``sqrt(mean(x^2))``."""
    return root((x * x).mean())


def power(base: Scalar, step: Scalar) -> Any:
    """``base ** step`` in double precision: in float32 ``1 - 0.999 ** 2`` has an error of 3e-5."""
    return (base.double() if isinstance(base, Tensor) else base) ** step


def pick(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Any:
    """``yes if condition else no``, without branching where the condition is a tensor."""
    if not isinstance(condition, Tensor):
        return yes if condition else no
    device = condition.device
    yes, no = (x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64, device=device) for x in (yes, no))
    return torch.where(condition, yes, no)


def moments(grad: Tensor, state: RuleState, betas: tuple[Scalar, Scalar]) -> RuleState:
    """Count the step, and average the gradient and its square."""
    mean = lerp(state["exp_avg"], grad, 1 - betas[0])
    square = mean_square(state["exp_avg_sq"], grad, betas[1])
    return {"step": state["step"] + 1, "exp_avg": mean, "exp_avg_sq": square}


def descent(grad: Tensor, y: Tensor, s: Settings) -> Tensor:
    """The gradient to descend along: its sign by `maximize`, plus ``weight_decay y`` unless that is decoupled."""
    grad = -grad if s["maximize"] else grad
    coupled = not s.get("decoupled_weight_decay", False)
    return add(grad, y, s["weight_decay"]) if coupled and is_on(s["weight_decay"]) else grad


def decoupled(direction: Tensor, y: Tensor, s: Settings) -> Move:
    """``lr (direction + weight_decay y)``, the second term only if the weight decay is decoupled."""
    if s["decoupled_weight_decay"] and is_on(s["weight_decay"]):
        direction = add(direction, y, s["weight_decay"])
    return Move(direction, s["lr"])
