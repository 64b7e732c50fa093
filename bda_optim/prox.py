r"""Proximal maps of the lower level's nonsmooth term g.

.. math:: \mathrm{prox}_{s g}(y) = \arg\min_z\ s\,g(z) + \tfrac12 \|z - y\|^2

The lower objective is f + g with a smooth f. A proximal map turns a gradient step on f into a step on f + g: the lower
direction becomes ``y - prox(y - lr grad f(y))``. Pass one as `prox=`, per parameter group.

With alpha > 0, y_K itself is **neither sparse nor feasible**, because the upper direction is added after the prox. The
paper's ``y~ = prox(y_K - lr grad f(y_K))`` is: read supports and ranks from `bda_optim.lower_point`.

Every map is a frozen dataclass, called as ``prox(y, step, hyper)``, tensor by tensor:

- `step` is the rate: a number or a tensor with one element. For a `separable` map, which treats each element alone, it
  may also be a tensor that broadcasts to y, with one rate per element. Projections do not depend on it.
- A strength is a number, a tensor (of such a shape again: one strength per feature, for example), or a function of
  `hyper` that returns either. Numbers are checked. The values of tensors are not, since reading them would wait for the
  device: keep a learned strength positive by ``exp`` or ``softplus``.
- Gradients flow into y, the rate and the strengths. At a kink the derivative is a limit of nearby derivatives or a mean
  of such limits, never NaN or infinite.

A map of your own is any function of ``(y, step, hyper)``; the attribute `separable` is optional. This one is that of
the barrier :math:`g(y) = -s \sum_i \log y_i`, which keeps y positive:

>>> import bda_optim as bda
>>> @dataclass(frozen=True)
... class log_barrier:
...     s: float
...     separable = True
...     def __call__(self, y, step, hyper):
...         return (y + (y * y + 4 * step * self.s).sqrt()) / 2
>>> lower = lambda y, x, batch: 0.5 * ((y - x) ** 2).sum()
>>> x = torch.tensor([3.0, -1.0], requires_grad=True)
>>> bda.rollout(lower, None, torch.ones(2), x, steps=50, lr=0.5, prox=log_barrier(0.1)).detach()
tensor([3.0330, 0.0916])

Reference:
    Parikh & Boyd, "Proximal Algorithms", Foundations and Trends in Optimization 1(3), 2014.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ._step.proximal import ProximalMap, Strength, norm, soft_threshold, waterline
from ._step.singular_values import shrink_singular_values

__all__ = ["box", "elastic_net", "group_lasso", "l1", "l1_ball", "l2_ball", "nonnegative", "nuclear", "simplex"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True, eq=False)
class l1(ProximalMap):
    r"""The soft threshold, for sparse solutions (Parikh & Boyd 2014, section 6.5.2).

    .. math:: g(y) = s \|y\|_1, \qquad \mathrm{prox}(y)_i = \mathrm{sign}(y_i) \max(|y_i| - \mathrm{step}\, s,\ 0)

    Args:
        s: The strength.

    >>> l1(lambda hyper: hyper.exp())(torch.tensor([2.0, -0.3]), step=0.5, hyper=torch.tensor(0.0))
    tensor([1.5000, 0.0000])
    """

    s: Strength

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        return soft_threshold(y, step * self._strength("s", y, hyper))


@dataclass(frozen=True, eq=False)
class elastic_net(ProximalMap):
    r"""The soft threshold, then shrinkage (Parikh & Boyd 2014, section 6.5.3).

    .. math:: g(y) = l_1 \|y\|_1 + \tfrac{l_2}{2} \|y\|^2, \qquad
              \mathrm{prox}(y)_i = \mathrm{sign}(y_i)\, \max(|y_i| - \mathrm{step}\, l_1, 0) / (1 + \mathrm{step}\, l_2)

    Args:
        l1: The strength of the absolute values.
        l2: The strength of the squares.

    >>> elastic_net(0.5, 2.0)(torch.tensor([2.0, -0.3]), step=1.0)
    tensor([0.5000, 0.0000])
    """

    l1: Strength
    l2: Strength

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        return soft_threshold(y, step * self._strength("l1", y, hyper)).div(1 + step * self._strength("l2", y, hyper))


@dataclass(frozen=True, eq=False)
class group_lasso(ProximalMap):
    r"""Shrinks the norm of each group, so that whole groups vanish (Yuan & Lin, J. R. Stat. Soc. B 68, 2006).

    .. math:: g(y) = s \sum_G \|y_G\|_2, \qquad \mathrm{prox}(y)_G = \max(1 - \mathrm{step}\, s / \|y_G\|,\ 0)\; y_G

    Args:
        s: The strength.
        dim: One group per index of this dimension. In the weight of a linear layer, 0 makes a group per output,
            1 a group per input.

    >>> group_lasso(1.0)(torch.tensor([[3.0, 4.0]]), step=1.0)
    tensor([[2.4000, 3.2000]])
    """

    separable = False
    s: Strength
    dim: int = 0

    def __post_init__(self) -> None:
        self._check("s", self.s)

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        if not isinstance(self.dim, int) or not -y.dim() <= self.dim < y.dim():
            raise ValueError(f"`dim` must be one dimension of {tuple(y.shape)}; got {self.dim}. Use another group.")
        threshold = step * self._strength("s", y, hyper)
        rows = y.movedim(self.dim, -1).reshape(-1, y.shape[self.dim]).mT
        length = norm(rows).reshape([-1 if d == self.dim % y.dim() else 1 for d in range(y.dim())])
        gone = length < threshold
        return torch.where(gone, 0.0, y * (1 - threshold / torch.where(gone | (length == 0), 1.0, length)))


@dataclass(frozen=True, eq=False)
class nuclear(ProximalMap):
    r"""The soft threshold of the singular values, for low rank (Cai, Candès & Shen, SIAM J. Optim. 20, 2010).

    .. math:: g(Y) = s \sum_i \sigma_i, \qquad \mathrm{prox}(U \Sigma V^\top) = U (\Sigma - \mathrm{step}\, s)_+ V^\top

    Derivatives of every order are right, also where singular values coincide or are zero; at a singular value equal to
    the threshold the first one is the mean of both sides. A tensor of more than two dimensions counts as the matrix
    ``reshape(shape[0], -1)``. On CUDA the decomposition itself waits for the device.

    Args:
        s: The strength.

    >>> nuclear(1.0)(torch.ones(1, 4), step=1.0)
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    separable = False
    s: Strength

    def __new__(cls, *_: Any, **__: Any) -> nuclear:
        """Hide the map from torch.compile."""
        # Inlined by torch.compile (2.13), the function silently loses tangents. Not at import, where this takes 1.3 s.
        if not torch.compiler.is_dynamo_compiling():
            torch.compiler.allow_in_graph(shrink_singular_values)
        return super().__new__(cls)

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        if y.dim() < 2:
            raise ValueError(f"`nuclear` needs two dimensions or more; got {tuple(y.shape)}. Use another group.")
        threshold = step * self._strength("s", y, hyper)
        matrix = y.reshape(y.shape[0], -1)
        if matrix.shape[0] > matrix.shape[1]:
            return shrink_singular_values(matrix.mT, threshold).mT.reshape(y.shape)
        return shrink_singular_values(matrix, threshold).reshape(y.shape)


@dataclass(frozen=True, eq=False)
class nonnegative(ProximalMap):
    r"""The projection on the nonnegative orthant.

    .. math:: \mathrm{prox}(y)_i = \max(y_i,\ 0)

    >>> nonnegative()(torch.tensor([2.0, -0.3]), step=1.0)
    tensor([2., 0.])
    """

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        return torch.where(y < 0, 0.0, y)


@dataclass(frozen=True, eq=False)
class box(ProximalMap):
    r"""The projection on a box.

    .. math:: \mathrm{prox}(y)_i = \min(\max(y_i,\ \mathrm{low}),\ \mathrm{high})

    Args:
        low: The lower bound; it may be ``-inf``.
        high: The upper bound; it may be ``inf``.

    >>> box(-1.0, 1.0)(torch.tensor([2.0, -0.3]), step=1.0)
    tensor([ 1.0000, -0.3000])
    """

    low: Strength
    high: Strength

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.low, Real) and isinstance(self.high, Real) and self.low > self.high:
            raise ValueError(f"`low` of `box` must not exceed `high`; got {self.low} > {self.high}. Exchange them.")

    def _check(self, name: str, value: Any) -> None:
        if not isinstance(value, Real) or math.isnan(value):
            super()._check(name, value)

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        low = self._strength("low", y, hyper)
        high = self._strength("high", y, hyper)
        return torch.where(y < low, low, torch.where((y > high) | (low >= high), high, y))


@dataclass(frozen=True, eq=False)
class l2_ball(ProximalMap):
    r"""The projection of the whole tensor on a Euclidean ball.

    .. math:: \mathrm{prox}(y) = \min(1,\ r / \|y\|_2)\; y

    Args:
        r: The radius.

    >>> l2_ball(1.0)(torch.tensor([3.0, 4.0]), step=1.0)
    tensor([0.6000, 0.8000])
    """

    separable = False
    r: Strength

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        radius = self._strength("r", y, hyper)
        length = norm(y.reshape(-1)).reshape(())
        inside = length < radius
        return torch.where(inside, y, y * (radius / torch.where(inside | (length == 0), 1.0, length)))


@dataclass(frozen=True, eq=False)
class l1_ball(ProximalMap):
    r"""The projection of the whole tensor on the ball :math:`\|y\|_1 \le r` (Duchi et al., ICML 2008).

    .. math:: \mathrm{prox}(y)_i = \mathrm{sign}(y_i) \max(|y_i| - \theta,\ 0), \qquad \theta \ge 0 \text{ minimal}

    Args:
        r: The radius.

    >>> l1_ball(1.0)(torch.tensor([2.0, -1.5, 0.1]), step=1.0)
    tensor([ 0.7500, -0.2500,  0.0000])
    """

    separable = False
    r: Strength

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        level, point = waterline(y.abs().reshape(-1), self._strength("r", y, hyper))
        return torch.where(level < 0, y, y.sign() * point.reshape(y.shape))


@dataclass(frozen=True, eq=False)
class simplex(ProximalMap):
    r"""The projection of the whole tensor on :math:`y \ge 0,\ \sum_i y_i = \mathrm{total}` (Duchi et al., ICML 2008).

    .. math:: \mathrm{prox}(y)_i = \max(y_i - \theta,\ 0), \qquad \theta \text{ such that the sum is right}

    Args:
        total: The sum.

    >>> simplex()(torch.tensor([2.0, 1.5, 0.1]), step=1.0)
    tensor([0.7500, 0.2500, 0.0000])
    """

    separable = False
    total: Strength = 1.0

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        # A common shift changes neither the point nor its derivative; without it large elements would absorb the total.
        shifted = (y - y.detach().amax()).reshape(-1)
        return waterline(shifted, self._strength("total", y, hyper))[1].reshape(y.shape)
