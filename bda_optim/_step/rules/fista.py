"""Accelerated proximal gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..._support.types import Move, RuleState, Scalar, Settings
from .base import (
    ParameterRule,
    _add,
    _lower,
    _pick,
    _settings,
)


class FISTA(ParameterRule):
    """Accelerated (proximal) gradient descent: the gradient is taken at an extrapolated point.

    ``t_k = (1 + sqrt(1 + 4 t_{k-1}^2)) / 2`` with ``t_1 = 1``, ``z = y + ((t_{k-1} - 1) / t_k) (y - y_previous)``,
    ``D = y - z + lr g(z)``, so that ``prox(y - D) = prox(z - lr g(z))``. The rate is ``O(1 / k^2)`` on convex losses,
    for ``lr <= 1 / L``; not recommended with noisy gradients, whose errors accumulate.
    Reference: Beck & Teboulle, A fast iterative shrinkage-thresholding algorithm, SIAM J. Imaging Sci. 2009.
    """

    defaults = _settings(lr=1e-3, weight_decay=0.0, maximize=False)

    def point(self, params: Sequence[Tensor], state: Any, settings: Settings) -> Sequence[Tensor]:
        """Return the extrapolated points z."""
        return [self._extrapolate(y, s)[0].to(y.dtype) for y, s in zip(params, state, strict=True)]

    def _extrapolate(self, y: Tensor, state: RuleState) -> tuple[Tensor, Scalar]:
        before = state["t"]
        now = (1 + (1 + 4 * before * before) ** 0.5) / 2
        # 0 in the first step: there y_previous is a copy of y, and a weight would give z the wrong derivative.
        weight = _pick(before > 1, before - 1, 0.0) / now
        return _add(y, y - state["prev"], weight), now

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        return {"prev": param.clone(), "t": 0.0}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        z, t = self._extrapolate(param, state)
        displacement = _add(param - z, _lower(grad, z, s), s["lr"])
        return Move(displacement, 1.0), {"prev": param, "t": t}
