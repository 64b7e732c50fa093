r"""Schedules of alpha, the weight a_k of the upper direction in step k = 1, 2, ...

A schedule is called like a function, ``schedule(k)``, and is a frozen dataclass, so that it prints, compares and
pickles. All of them clip at 1 - 1e-6: the lower direction never vanishes.

Convergence to the optimistic solution needs :math:`a_k \to 0` **and** :math:`\sum_k a_k = \infty`. By the first, the
lower level wins in the end; by the second, the upper level can choose among the minimisers of the lower one.
`harmonic`, `theory`, and `polynomial` with a power in (0, 1] satisfy both. `geometric`, and `polynomial` with a power
above 1, fail the second and warn.

A constant may be a tensor of one element that requires grad. Then a_k is a tensor, differentiable in the constant, with
the derivative 0 where a_k is clipped. The values of tensors are not checked, since that would read them back from the
device: keep a learned constant positive by ``exp`` or ``softplus``. Where the loop is traced, k and a_k are
tensors, too.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from .._support.types import Scalar, TensorFields

__all__ = ["EPS", "Schedule", "constant", "from_plain", "geometric", "harmonic", "polynomial", "theory", "to_plain"]

EPS: Final = 1e-6
"""No weight exceeds 1 - EPS."""


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(TensorFields):
    """What the factories of this module return: a function of k = 1, 2, ... with values in [0, 1)."""

    name: ClassVar[str]

    def __call__(self, k: int | Tensor) -> Scalar:
        """Return a_k, a plain float unless `k` or one of the constants is a tensor.

        Args:
            k: The step, counted from 1; a number, or a 0-dim float64 tensor where the loop is traced.

        Returns:
            The weight of the upper direction in step k; a plain 0.0 if the constant is a plain 0, whatever `k` is.
        """
        if not isinstance(k, Tensor) and k < 1:
            raise ValueError(f"`k` counts the steps from 1; got {k}. Call `schedule(1)` for the first step.")
        if self._plainly_zero():
            return 0.0
        largest = 1 - getattr(self, "eps", EPS)
        alpha = self._weight(k.double() if isinstance(k, Tensor) and not k.is_floating_point() else k)
        if isinstance(alpha, Tensor):
            # In a 16-bit dtype 1 - 1e-6 is 1: stay at least one representable number below it.
            return alpha.clamp(max=min(largest, 1 - torch.finfo(alpha.dtype).eps / 2))
        return float(min(alpha, largest))

    def _weight(self, k: int | Tensor) -> Scalar:
        raise NotImplementedError

    def _plainly_zero(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"


@dataclass(frozen=True, eq=False, repr=False)
class _Scaled(Schedule):
    """A schedule that is proportional to `c`."""

    c: Scalar

    def __post_init__(self) -> None:
        _check(self, "c", lambda c: c >= 0, "must not be negative", "Use a weight such as 0.5")

    def _plainly_zero(self) -> bool:
        return not isinstance(self.c, Tensor) and self.c == 0


class _Constant(_Scaled):
    name = "constant"

    def _weight(self, k: int | Tensor) -> Scalar:
        return _scalar(self.c) * torch.ones_like(k) if isinstance(k, Tensor) else _scalar(self.c)


class _Harmonic(_Scaled):
    name = "harmonic"

    def _weight(self, k: int | Tensor) -> Scalar:
        return _scalar(self.c) / k


@dataclass(frozen=True, eq=False, repr=False)
class _Polynomial(_Scaled):
    name = "polynomial"
    power: Scalar

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "power", lambda power: power >= 0, "must not be negative", "Use a power in (0, 1]")

    def _weight(self, k: int | Tensor) -> Scalar:
        return _scalar(self.c) / k ** _scalar(self.power)


@dataclass(frozen=True, eq=False, repr=False)
class _Geometric(_Scaled):
    name = "geometric"
    decay: Scalar

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "decay", lambda decay: 0 <= decay < 1, "must lie in [0, 1)", "Use `constant(c)` for a decay of 1")

    def _weight(self, k: int | Tensor) -> Scalar:
        return _scalar(self.c) * _scalar(self.decay) ** (k - 1)


@dataclass(frozen=True, eq=False, repr=False)
class _Theory(Schedule):
    name = "theory"
    upper_lr: Scalar
    upper_strong_convexity: Scalar
    upper_smoothness: Scalar
    gamma: Scalar
    eps: float

    def __post_init__(self) -> None:
        for field in ("upper_lr", "upper_strong_convexity", "upper_smoothness"):
            _check(self, field, lambda value: value > 0, "must be positive", "Take it from the upper objective")
        _check(self, "gamma", lambda gamma: 0 < gamma <= 1, "must lie in (0, 1]", "Use 1.0")
        _check(self, "eps", lambda eps: 0 < eps < 1, "must lie in (0, 1)", "Use 1e-6", tensor=False)
        sigma = self.upper_strong_convexity
        smooth = self.upper_smoothness
        if isinstance(sigma, Tensor) or isinstance(smooth, Tensor):
            return
        if sigma > smooth:
            got = f"got {sigma} > {smooth}. Exchange them"
            raise ValueError(f"`upper_strong_convexity` must not exceed `upper_smoothness`; {got}.")
        limit = 2 / (smooth + sigma)
        # The user's 2 / (L + sigma) may be rounded.
        if not isinstance(self.upper_lr, Tensor) and self.upper_lr > limit * (1 + 1e-12):
            interval = f"(0, 2 / (upper_smoothness + upper_strong_convexity)] = (0, {limit:.6g}]"
            raise ValueError(f"`upper_lr` must lie in {interval}; got {self.upper_lr}. Lower it.")

    def _weight(self, k: int | Tensor) -> Scalar:
        s_u, sigma, smooth = (_scalar(v) for v in (self.upper_lr, self.upper_strong_convexity, self.upper_smoothness))
        drop = 2 * s_u * sigma * smooth / (sigma + smooth)
        beta = _sqrt(1 - drop)
        one_minus_beta = drop / (1 + beta)  # not 1 - beta, which is 0 in floating point where drop < 1e-16
        return 2 * _scalar(self.gamma) / (k * one_minus_beta)


def constant(c: Scalar) -> Schedule:
    r"""The same weight in every step.

    .. math:: a_k = \min\{c,\ 1 - 10^{-6}\}

    Not recommended where the lower level must be solved exactly, because a_k does not vanish: y_K settles between the
    two levels.

    Args:
        c: The weight, not negative; a number or a learnable tensor with one element.

    >>> alpha = constant(0.25)
    >>> alpha(1), alpha(100)
    (0.25, 0.25)
    """
    return _Constant(c)


def harmonic(c: Scalar) -> Schedule:
    r"""A weight that falls as 1/k: it vanishes, and its sum diverges.

    .. math:: a_k = \min\{c / k,\ 1 - 10^{-6}\}

    Args:
        c: The weight of the first step, not negative; a number or a learnable tensor with one element.

    >>> alpha = harmonic(0.5)
    >>> alpha, alpha(1), alpha(10)
    (harmonic(c=0.5), 0.5, 0.05)

    Reference:
        Liu, Mu, Yuan, Zeng, Zhang, "A Generic First-Order Algorithmic Framework for Bi-Level Programming Beyond
        Lower-Level Singleton", ICML 2020.
    """
    return _Harmonic(c)


def polynomial(c: Scalar, power: Scalar) -> Schedule:
    r"""A weight that falls as a power of k.

    .. math:: a_k = \min\{c / k^{p},\ 1 - 10^{-6}\}

    Args:
        c: The weight of the first step, not negative; a number or a learnable tensor with one element.
        power: The power p, in (0, 1] for convergence; above 1 the sum is finite, and a UserWarning says so.

    >>> polynomial(0.5, power=0.5)(4)
    0.25
    """
    if not isinstance(power, Tensor) and power > 1:
        _warn_finite_sum(f"polynomial(power={power})", "Use a power in (0, 1]")
    return _Polynomial(c, power)


def geometric(c: Scalar, decay: Scalar) -> Schedule:
    r"""A weight that falls by the same factor in every step.

    .. math:: a_k = \min\{c\,q^{k-1},\ 1 - 10^{-6}\}

    Not recommended, because its sum is finite: the upper level can move y only by a bounded distance. Unless the lower
    level has a single solution, y_K does not reach the optimistic one, however large K is. A UserWarning says so.

    Args:
        c: The weight of the first step, not negative; a number or a learnable tensor with one element.
        decay: The factor q, in [0, 1); a number or a learnable tensor with one element.

    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     alpha = geometric(0.5, decay=0.5)
    >>> alpha(1), alpha(2), alpha(3)
    (0.5, 0.25, 0.125)
    """
    _warn_finite_sum("geometric", "Use `harmonic(c)`")
    return _Geometric(c, decay)


def theory(
    upper_lr: Scalar, upper_strong_convexity: Scalar, upper_smoothness: Scalar, gamma: Scalar = 1.0, eps: float = EPS
) -> Schedule:
    r"""The weights for which the convergence of BDA is proved.

    .. math:: a_k = \min\Big\{\frac{2\gamma}{k(1-\beta)},\ 1-\varepsilon\Big\}, \qquad
              \beta = \sqrt{1 - \frac{2 s_u \sigma L_F}{\sigma + L_F}}

    Both constants belong to the upper objective F as a function of y. The first weights, up to
    k = 2 gamma / (1 - beta), are clipped: the upper level leads at first.

    Args:
        upper_lr: s_u, the rate of the upper direction, in (0, 2 / (L_F + sigma)].
        upper_strong_convexity: sigma, at most L_F.
        upper_smoothness: L_F, the Lipschitz constant of the gradient of F in y.
        gamma: In (0, 1].
        eps: In (0, 1), a number.

    >>> alpha = theory(upper_lr=1.0, upper_strong_convexity=1.0, upper_smoothness=1.0)  # beta = 0
    >>> alpha(1), alpha(4), alpha(100)
    (0.999999, 0.5, 0.02)

    Reference:
        Sabach, Shtern, "A First Order Method for Solving Convex Bilevel Optimization Problems", SIAM J. Optim., 2017;
        Liu et al., ICML 2020, the proposition on y_K.
    """
    return _Theory(upper_lr, upper_strong_convexity, upper_smoothness, gamma, eps)


_BUILT_IN: Final[Mapping[str, type[Schedule]]] = {
    cls.name: cls for cls in (_Constant, _Harmonic, _Polynomial, _Geometric, _Theory)
}


def to_plain(schedule: object) -> dict[str, Any] | None:
    """Return a built-in schedule as a name and numbers, which ``torch.load(weights_only=True)`` accepts.

    Tensors are passed on, not copied. For anything else, such as a user's function, the result is None.

    >>> to_plain(harmonic(0.5))
    {'schedule': 'harmonic', 'c': 0.5}
    >>> to_plain(lambda k: 0.5 / k) is None
    True
    """
    if not isinstance(schedule, Schedule) or _BUILT_IN.get(schedule.name) is not type(schedule):
        return None
    numbers = {key: v if isinstance(v, Tensor) else float(v) for key, v in vars(schedule).items()}
    return {"schedule": schedule.name, **numbers}


def from_plain(plain: Mapping[str, Any]) -> Schedule:
    """Return the schedule that `to_plain` described; a warning that it gave once is not repeated.

    >>> from_plain({"schedule": "harmonic", "c": 0.5})
    harmonic(c=0.5)
    """
    constants = dict(plain)
    if (name := constants.pop("schedule", None)) not in _BUILT_IN:
        raise ValueError(f"`schedule` must be one of {', '.join(_BUILT_IN)}; got {name!r}. Use a dict from `to_plain`.")
    cls = _BUILT_IN[name]
    expected = {field.name for field in dataclasses.fields(cls)}
    if set(constants) != expected:
        raise ValueError(f"`{name}` has the constants {sorted(expected)}; got {sorted(constants)}. Use `to_plain`.")
    return cls(**constants)


def _scalar(value: Scalar) -> Scalar:
    return value.reshape(()) if isinstance(value, Tensor) else value


def _sqrt(square: Scalar) -> Scalar:
    if not isinstance(square, Tensor):
        return math.sqrt(max(square, 0.0))
    # The slope at 0 is infinite, and times the 0 of a clipped weight it would be NaN; so it counts as 0.
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def _check(schedule: Schedule, field: str, allowed: Any, rule: str, advice: str, tensor: bool = True) -> None:
    """Raise if a number breaks the rule; of a tensor only the shape and the dtype are checked."""
    value = getattr(schedule, field)
    what = f"`{field}` of `{schedule.name}`"
    if isinstance(value, Tensor) and tensor:
        if value.numel() != 1 or not value.is_floating_point():
            got = f"{tuple(value.shape)}, {value.dtype}"
            raise ValueError(f"{what} must be a floating-point tensor with one element; got {got}. Use a 0-dim tensor.")
    elif not isinstance(value, Real):
        kinds = "a number or a tensor" if tensor else "a number"
        raise TypeError(f"{what} must be {kinds}; got {type(value).__name__}. {advice}.")
    elif not (math.isfinite(value) and allowed(value)):
        raise ValueError(f"{what} {rule}; got {value}. {advice}.")


def _warn_finite_sum(what: str, advice: str) -> None:
    warnings.warn(
        f"the weights of `{what}` have a finite sum: without a lower-level singleton BDA does not converge to the "
        f"optimistic solution, however large K is. {advice}.",
        UserWarning,
        stacklevel=3,
    )
