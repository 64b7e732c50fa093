"""What proximal maps share, and the pieces of their equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from .._support.tensors import broadcasts
from .._support.types import Scalar, TensorFields

Strength: TypeAlias = float | Tensor | Callable[[Any], Scalar]


class NO_HYPER:
    """The class itself stands for the `hyper` of an inner loop that has none; None is a hyper like any other."""


@dataclass(frozen=True, eq=False)
class ProximalMap(TensorFields):
    """What the maps of `bda_optim.prox` share: checks, strengths, shapes and dtypes.

    A subclass defines `_point`, the map itself. `separable` says that each element is treated alone.
    """

    separable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            self._check(name, value)

    def __call__(self, y: Tensor, step: Scalar, hyper: Any = NO_HYPER) -> Tensor:
        """Return the proximal point of `y`, of the same shape and type."""
        if not y.is_floating_point():
            raise TypeError(f"`{type(self).__name__}` needs a real floating-point tensor; got {y.dtype}. Convert it.")
        if y.numel() == 0:
            return y
        wide = y if self.separable else y.to(torch.promote_types(y.dtype, torch.float32))  # sums need more than 16 bits
        return self._point(wide, self._fit("the rate", step, wide), hyper).to(y.dtype)

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        raise NotImplementedError

    def _strength(self, name: str, y: Tensor, hyper: Any) -> Any:
        value = getattr(self, name)
        if callable(value) and not isinstance(value, Tensor):
            if hyper is NO_HYPER:
                raise ValueError(
                    f"`{name}` of `{type(self).__name__}` is a function of hyper; got an inner loop that has none. Use "
                    "`unroll(...)` or `hypergradient(...)` with `hyper=`, or pass a tensor instead of the function."
                )
            value = value(hyper)
            self._check(name, value)
        return self._fit(f"`{name}`", value, y)

    def _fit(self, what: str, value: Scalar, y: Tensor) -> Scalar:
        """Return a number or a tensor of y's type that broadcasts to y; a 0-dim tensor if the map is not separable."""
        if not isinstance(value, Tensor):
            return value if self.separable else y.new_full((), value)
        if value.numel() == 1:
            return value.reshape(()).to(y.dtype)
        allowed = f"broadcast to {tuple(y.shape)}" if self.separable else "have one element (it is not separable)"
        if not self.separable or not broadcasts(value.shape, y.shape):
            what = f"{what} of `{type(self).__name__}` must {allowed}; got the shape {tuple(value.shape)}"
            raise ValueError(f"{what}. Use a scalar, or a separable map such as `l1`.")
        return value.to(y.dtype)

    def _check(self, name: str, value: Any) -> None:
        what = f"`{name}` of `{type(self).__name__}`"
        if not isinstance(value, (Tensor, Real)) and not callable(value):
            raise TypeError(f"{what} must be a number, a tensor or a function of hyper; got {value!r}. Use a number.")
        if isinstance(value, Real) and not 0 <= float(value) < math.inf:
            raise ValueError(f"{what} must be finite and not negative; got {value}. Use a number >= 0.")


def soft_threshold(y: Tensor, threshold: Scalar) -> Tensor:
    """``sign(y) max(|y| - threshold, 0)``."""
    # In this form NaN stays NaN, and a threshold of 0 is the identity at y = 0 too, with the derivative 1.
    return torch.where(y.abs() < threshold, 0.0, y - threshold * y.sign())


def norm(rows: Tensor) -> Tensor:
    """Return the Euclidean norms over the last dimension, which is kept; all derivatives at 0 are 0."""
    scale = rows.detach().abs().amax(-1, keepdim=True)  # so that no square underflows
    square = (rows / torch.where(scale == 0, 1.0, scale)).square().sum(-1, keepdim=True)
    return scale * torch.where(scale == 0, 1.0, square).sqrt()


def waterline(v: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return theta with sum(max(v - theta, 0)) = total, and max(v - theta, 0), differentiated with a fixed support."""
    top = v.detach().sort(descending=True).values
    rank = torch.arange(1, v.numel() + 1, dtype=v.dtype, device=v.device)
    count = (top * rank > top.cumsum(0) - total.detach()).sum().clamp(min=1)
    active = ~(v < top.gather(0, count.reshape(1) - 1))  # in this form NaN is active, and spreads
    count = active.sum()
    level = (torch.where(active, v, 0.0).sum() - total) / count
    # Where the total is 0 the set is a single point, whatever v is.
    return level, torch.where(active, torch.where(total > 0, (v - level).clamp(min=0), total / count), 0.0)
