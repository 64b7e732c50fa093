"""Accelerated proximal gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..._support.types import Move, RuleState, Scalar, Settings
from .arithmetic import add, descent, pick
from .base import ParameterRule, read_only


class FISTA(ParameterRule):
    r"""Accelerated (proximal) gradient descent: the gradient is taken at an extrapolated point z.

    .. math:: t_k = \tfrac12 \Big(1 + \sqrt{1 + 4 t_{k-1}^2}\Big),\ t_1 = 1, \qquad
              z_k = y_k + \frac{t_{k-1} - 1}{t_k} (y_k - y_{k-1}), \qquad D_k = y_k - z_k + s_l \nabla f(z_k)

    So ``prox(y - D) = prox(z - lr grad f(z))``. On convex losses the error falls as ``O(1 / k^2)`` for ``lr <= 1 / L``.
    Not recommended with noisy gradients, because their errors accumulate. With alpha > 0 both gradients are taken at z.

    Settings: `lr` (1e-3), `weight_decay` (0.0), `maximize` (False).

    >>> import torch, bda_optim as bda
    >>> lower = lambda y, x, batch: 0.5 * ((y - x) ** 2 * torch.tensor([1.0, 0.02])).sum()
    >>> x = torch.tensor([2.0, 2.0], requires_grad=True)
    >>> for rule in (torch.optim.SGD, bda.FISTA):
    ...     y = bda.rollout(lower, None, torch.zeros(2), x, steps=60, lr=1.0, rule=rule, prox=bda.prox.l1(0.01))
    ...     print(y.detach())  # the solution is [1.99, 1.5]
    tensor([1.9900, 1.0537])
    tensor([1.9900, 1.4462])

    Reference:
        Beck & Teboulle, "A Fast Iterative Shrinkage-Thresholding Algorithm for Linear Inverse Problems", SIAM J.
        Imaging Sci. 2(1), 2009.
    """

    defaults = read_only(lr=1e-3, weight_decay=0.0, maximize=False)

    def point(self, params: Sequence[Tensor], state: Any, settings: Settings) -> Sequence[Tensor]:
        """Return the extrapolated points z."""
        return [self._extrapolate(y, s)[0].to(y.dtype) for y, s in zip(params, state, strict=True)]

    def _extrapolate(self, y: Tensor, state: RuleState) -> tuple[Tensor, Scalar]:
        before = state["t"]
        now = (1 + (1 + 4 * before * before) ** 0.5) / 2
        # 0 in the first step: there y_previous is a copy of y, and a weight would give z the wrong derivative.
        weight = pick(before > 1, before - 1, 0.0) / now
        return add(y, y - state["prev"], weight), now

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        return {"prev": param.clone(), "t": 0.0}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        z, t = self._extrapolate(param, state)
        displacement = add(param - z, descent(grad, z, s), s["lr"])
        return Move(displacement, 1.0), {"prev": param, "t": t}
