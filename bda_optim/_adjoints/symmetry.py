r"""Is the gradient of a loss the gradient of a function? If it is, its derivative G' is symmetric.

.. math:: \langle u, G' v \rangle = \langle v, G' u \rangle

A loss with a detached value, a `no_grad` block, a straight-through estimator or a gradient reversal gives autograd
another "gradient". A difference of such gradients is G' v; the hypergradient needs the transposed product.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._step.gradients import Grads
from .quotient import Gradient, difference, relative_norm, scaled_down, size

_DIRECTIONS = 4
"""A single direction showed as little as 1e-3 of a wrong loss."""


class Asymmetry(NamedTuple):
    """What random directions show.

    Attributes:
        gap: The largest difference of the two products, relative to the norm of one.
        noise: What the rounding of the gradients may amount to in it.
        allowed: What the gap of a function's gradient stays below.
    """

    gap: float
    noise: float
    allowed: float


def asymmetry(gradient: Gradient, values: Sequence[Tensor], direction: Grads, length: float, unit: float) -> Asymmetry:
    """Compare products of the derivative of a gradient with random directions, and return the worst.

    Directions in the values that `direction` moves come first, then those in the others (hyper): products by hyper may
    be small beside those by the lower variables, and be all that a hypergradient consists of.

    Args:
        gradient: The gradient by all values.
        values: Where its derivative is taken; those that require grad can move.
        direction: The direction that the hypergradient needs; None where nothing moves.
        length: The relative length of a move.
        unit: The unit of rounding.
    """
    probe = _Probe(gradient, values, direction, length, unit)
    points = [value.requires_grad and v is not None for value, v in zip(values, direction, strict=True)]
    others = [value.requires_grad and v is None for value, v in zip(values, direction, strict=True)]
    found = [probe.along(moving) for moving in (points, others) if any(moving)]
    return max(found, key=lambda one: math.inf if math.isnan(one.gap) else one.gap - one.allowed)


class _Probe:
    """What all random directions are compared with."""

    def __init__(
        self, gradient: Gradient, values: Sequence[Tensor], direction: Grads, length: float, unit: float
    ) -> None:
        self._gradient = gradient
        self._values = values
        self._length = length
        self._unit = unit
        self._v, _ = scaled_down(direction)
        self._along_v, self._beside = difference(gradient, values, self._v, length)
        self._rate = float(relative_norm(values, self._v))

    def along(self, moving: Sequence[bool]) -> Asymmetry:
        """Compare with random directions of some values.

        Their elements are as large as those of the tensor; where that leads out of a loss's domain, each as large as
        the one that it moves.
        """
        pairs = list(zip(self._values, moving, strict=True))
        found = self._compare([_magnitude(value) if moves else None for value, moves in pairs])
        if math.isfinite(found.gap):
            return found
        return self._compare([value.detach().abs() if moves else None for value, moves in pairs])

    def _compare(self, magnitudes: Grads) -> Asymmetry:
        if _weighted(magnitudes, self._along_v) == 0 == _weighted(magnitudes, self._beside):
            return Asymmetry(0.0, 0.0, _threshold(self._unit))  # the loss does not depend on these values
        products = [self._products(magnitudes, seed) for seed in range(_DIRECTIONS)]
        largest = max(abs(one - other) for one, other in products)
        if not all(math.isfinite(one - other) for one, other in products):
            largest = math.nan
        # A straight-through estimator makes the first of both zero.
        scale = max(_weighted(magnitudes, self._along_v), *(abs(other) for _, other in products))
        noise = _weighted([_magnitude(value) for value in self._values], self._beside) * self._rate / self._length
        share = _ratio(10 * self._unit * noise, scale)
        return Asymmetry(_ratio(largest, scale), share, share + _threshold(self._unit))

    def _products(self, magnitudes: Grads, seed: int) -> tuple[float, float]:
        """Return both products for one random direction."""
        generator = torch.Generator("cpu").manual_seed(seed)  # the user's random numbers stay as they are
        u: list[Tensor | None] = []
        for value, magnitude in zip(self._values, magnitudes, strict=True):
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu")
            u.append(None if magnitude is None else drawn.to(value.device, value.dtype) * magnitude)
        along_u, _ = difference(self._gradient, self._values, u, self._length)
        return _dot(u, self._along_v), _dot(self._v, along_u)


def _magnitude(value: Tensor) -> Tensor:
    """Return how large the elements of a tensor are, in the tensor's precision."""
    magnitude: Tensor = size(value) / max(1, value.numel()) ** 0.5
    return magnitude.to(value.device, value.real.dtype)


def _weighted(magnitudes: Grads, slopes: Grads) -> float:
    """Return the norm of slopes, each times the magnitude of what it is a slope by."""
    pairs = [(m, s) for m, s in zip(magnitudes, slopes, strict=True) if m is not None and s is not None]
    return math.hypot(*(float(torch.linalg.vector_norm((m * s).detach())) for m, s in pairs))


def _dot(first: Grads, second: Grads) -> float:
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    return sum(float((a.conj() * b).real.sum()) for a, b in pairs)


def _ratio(number: float, scale: float) -> float:
    return 0.0 if number == 0 else number / scale if scale else math.inf


def _threshold(unit: float) -> float:
    """Return what the gap of a smooth loss stays far below."""
    if unit < 1e-12:  # float64: 3e-9
        return 1e-5
    return 5e-3 if unit < 1e-6 else 0.3  # float32: 2e-4, bfloat16: 0.12


class _Known:
    """Which losses were probed, on which modules, and at which unit of rounding; none is kept alive."""

    def __init__(self) -> None:
        self._losses: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, set[float]]] = (
            weakref.WeakKeyDictionary()
        )
        self._nothing = nn.Module()  # stands for the module of a loss of tensors

    def units(self, loss: Any, module: nn.Module | None) -> set[float]:
        """Return the units of rounding at which a loss was probed; the caller adds to them."""
        try:
            modules = self._losses.setdefault(loss, weakref.WeakKeyDictionary())
        except TypeError:  # no weak reference to it, or no hash
            return set()
        return modules.setdefault(self._nothing if module is None else module, set())


known = _Known()
