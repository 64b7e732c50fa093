"""What is known of a rule: how far its steps go along a constant gradient, and whether that scales with the loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._step.stationary import DESCENT, SCALE_FREE, stationary_rate
from .inner_loop import InnerLoop


def is_scale_free(loop: InnerLoop) -> bool:
    """Whether a step has the same length for f and for 10 f, as those of Adam and its kin have.

    A rule that is not known is asked itself, by its first move from gradients of ones and of tens.
    """
    if loop.rule.name in (*DESCENT, *SCALE_FREE):
        return loop.rule.name in SCALE_FREE
    for members, settings in loop.groups:
        params = [loop.state.params[i].detach() for i in members]
        if not any(p.numel() for p in params):
            continue
        lengths = []
        for scale in (1.0, 10.0):
            with torch.no_grad():
                memory = loop.rule.init(params, settings)
                moves, _ = loop.rule.update([torch.full_like(p, scale) for p in params], memory, params, settings)
                lengths.append(sum(float(m.displacement().double().norm()) for m in moves if m is not None))
        if lengths[1] < 3 * lengths[0]:
            return True
    return False


def travelled(loop: InnerLoop) -> list[float | Tensor] | None:
    """Return per parameter the sum over k of its stationary rates, ``lr (1 - dampening) / (1 - momentum)``.

    Along a direction of curvature h, y forgets its start by the factor ``exp(-h times this)``. None for rules other
    than gradient descent, whose steps are not proportional to the gradient.
    """
    if loop.rule.name not in DESCENT:
        return None
    found: list[float | Tensor] = [0.0] * len(loop.names)
    for members, settings in loop.groups:
        total = _total(settings["lr"], loop.steps)
        for place, i in enumerate(members):
            found[i] = plain(stationary_rate({**settings, "lr": total}, place))
    return found


def _total(lr: Any, steps: int) -> Any:
    """Return the sum over k of a rate, which may be a function of k, or a list with one rate per parameter."""
    if callable(lr):
        return math.fsum(float(lr(k)) for k in range(1, steps + 1))
    return [steps * rate for rate in lr] if isinstance(lr, list) else steps * lr


def largest(setting: Any, steps: int) -> float:
    """Return the largest value of a setting, over k and over the parameters of a group."""
    if callable(setting):
        return max(float(setting(k)) for k in range(1, steps + 1))
    values = setting if isinstance(setting, list) else [setting]
    return max(float(v.detach().max()) if isinstance(v, Tensor) else float(v) for v in values)


def nth(setting: Any, place: int) -> Any:
    """Return the setting of one parameter: a list has one entry for each."""
    return setting[place] if isinstance(setting, list) else setting


def plain(value: Any) -> Any:
    """Return a number, where it is one; a tensor with one number per element as it is, detached."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else value.detach()
    return float(value)
