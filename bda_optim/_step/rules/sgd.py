"""Gradient descent with momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._support.types import Move, RuleState, Settings
from .arithmetic import add, descent, is_on, pick
from .base import ParameterRule, read_only


class SGD(ParameterRule):
    """Gradient descent with momentum; without momentum there is no state.

    ``b = momentum b + (1 - dampening) g``, the first b being g; ``D = lr b``, with `nesterov` ``lr (g + momentum b)``.
    Reference: Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """

    defaults = read_only(lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)

    def validate(self, settings: Settings) -> None:
        """Check the ranges, and that Nesterov's form has a momentum and no dampening."""
        super().validate(settings)
        s = {**self.defaults, **settings}
        if s["nesterov"] and (not is_on(s["momentum"]) or is_on(s["dampening"])):
            got = f"`momentum`={s['momentum']} and `dampening`={s['dampening']}"
            raise ValueError(f"`nesterov` needs a momentum above 0 and dampening 0; got {got}. Try momentum=0.9.")

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        # A zero buffer gives torch.optim's iterates, and the right derivative: torch detaches the first buffer.
        buffer = {"momentum_buffer": torch.zeros_like(param)} if is_on(s["momentum"]) else {}
        return {**buffer, "step": 0} if buffer and is_on(s["dampening"]) else buffer

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        grad = descent(grad, param, s)
        if not is_on(s["momentum"]):
            return Move(grad, s["lr"]), state
        weight = 1 - s["dampening"]
        if "step" in state:
            weight = pick(state["step"] > 0, weight, 1.0)
            state = {**state, "step": state["step"] + 1}
        buffer = add(state["momentum_buffer"] * s["momentum"], grad, weight)
        direction = add(grad, buffer, s["momentum"]) if s["nesterov"] else buffer
        return Move(direction, s["lr"]), {**state, "momentum_buffer": buffer}
