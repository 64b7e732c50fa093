"""One solve of ``A v = b`` by products with A: its vectors, its residual, and what is known of A.

A vector is a list of real matrices of shape (B, n): B systems (tasks) are solved side by side, each with coefficients
of its own, and one that has converged stays as it is. Right-hand sides are normalised, so that their scale does not
matter: the squares of a right-hand side of 1e-25 underflow in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Vector: TypeAlias = list[Tensor]
Product: TypeAlias = Callable[[Vector], Vector]

HARMLESS = 0.01
"""A residual that stalls below this is let pass: 1.5e-3 of dF/dy lies in the null space of softmax regression."""


class Solution(NamedTuple):
    """What a solver returns, for each of the B systems.

    Attributes:
        vector: The last iterate.
        residual: ``|b - A v| / |b|``; 0 where b is 0.
        stalled: Whether the residual cannot be reduced further, because it is orthogonal to the range of A.
        products: The number of products with A, the same for all systems.
        low: The smallest Ritz value (GMRES: singular value, Neumann: an estimate); NaN if there is none. Of a system
            that stalled, the smallest that is not zero to the tolerance.
        high: The largest.
        history: The largest residual of all systems after each product, as the solver's recurrence has it.
    """

    vector: Vector
    residual: Tensor
    stalled: Tensor
    products: int
    low: Tensor
    high: Tensor
    history: list[float]


class Solve:
    """One solve: the normalised right-hand side, the iterate, its residual, and the count of products."""

    def __init__(self, product: Product, b: Vector, start: Vector | None, tol: float, limit: int) -> None:
        self._product = product
        self.tol = tol
        self._limit = limit
        eps = max(torch.finfo(t.dtype).eps for t in b)
        self.rounding = 4 * eps
        # On a singular A the loss of orthogonality keeps |A r| / |r| from falling further than this in one cycle.
        self.loss = 10 * eps**0.5
        # An eigenvalue below this, relative to |A|, counts as 0.
        self.flat = eps ** (2 / 3)
        self._peak = torch.stack([t.abs().amax(1).double().to(b[0].device) for t in b if t.numel()]).amax(0)
        unit = scaled(b, inverse(self._peak))
        self._norm = norm(unit)
        self.b = scaled(unit, inverse(self._norm))
        self.x = [torch.zeros_like(t) for t in b]
        self.remainder = self.b
        self.residual = torch.where(torch.isfinite(self._norm), norm(self.b), math.nan)
        self.products = 0
        self.history: list[float] = []
        self.stalled = torch.zeros_like(self.residual, dtype=torch.bool)
        self.size = torch.zeros_like(self.residual)
        self.low = torch.full_like(self.residual, math.nan)
        self.high = torch.full_like(self.residual, math.nan)
        if start is not None:
            self.x = scaled(scaled(start, inverse(self._peak)), inverse(self._norm))
            self.verify()
            self._limit += 1  # or else a limit of 1 would return the start for ever

    def product(self, v: Vector) -> Vector:
        """Return A v, and count it."""
        self.products += 1
        return self._product(v)

    def verify(self) -> None:
        """Compute the true residual."""
        self.remainder = combined(self.b, self.product(self.x), torch.full_like(self.residual, -1.0))
        self.residual = norm(self.remainder)

    def keep(self, better: Tensor, x: Vector) -> None:
        """Go back to the iterate `x` where the new one is not better."""
        if not bool(better.all()):
            step = [new - old for new, old in zip(self.x, x, strict=True)]
            self.x = combined(x, step, better.double())
            self.verify()

    def judge_symmetric(self) -> None:
        """Note which residuals stall: their Rayleigh quotients tell a null space from small eigenvalues."""
        slope = self.product(self.remainder)
        quotient = dot(self.remainder, slope).abs() <= self.flat * self.size * self.residual**2
        self.stalled |= self.open & quotient & (norm(slope) <= self.flat**0.5 * self.size * self.residual)

    def judge(self, transposed: Product, progress: Tensor) -> None:
        """Note which residuals stall: they are orthogonal to the range of A.

        Nearly orthogonal is enough where the residual is no longer reduced, and too large to be let pass.
        """
        slope = norm(transposed(self.remainder))
        near = torch.where(progress | (self.residual <= HARMLESS), self.loss, 0.1)
        self.stalled |= self.open & (slope <= near * self.size * self.residual)

    def probe(self) -> None:
        """Estimate |A| by a product with random numbers, where the residual tells nothing of it."""
        generator = torch.Generator().manual_seed(0)
        noise = [torch.randn(t.shape, generator=generator, dtype=t.dtype, device="cpu").to(t.device) for t in self.b]
        self.size = torch.maximum(self.size, norm(self.product(noise)) / norm(noise))

    @property
    def open(self) -> Tensor:
        """Which systems need more work; without a tolerance all that are not exact."""
        enough = self.rounding if math.isinf(self.tol) else self.tol
        return (self.residual > enough) & ~self.stalled & torch.isfinite(self.residual)

    @property
    def left(self) -> int:
        """How many products may follow."""
        return self._limit - self.products

    def note(self, values: Tensor, valid: Tensor) -> None:
        """Take the extremes of the valid ones of (B, k) eigenvalues or singular values into account."""
        low = values.masked_fill(~valid, math.inf).amin(1)
        high = values.masked_fill(~valid, -math.inf).amax(1)
        self.low = torch.fmin(self.low, torch.where(low < math.inf, low, math.nan))
        self.high = torch.fmax(self.high, torch.where(high > -math.inf, high, math.nan))

    def solution(self) -> Solution:
        """Return the iterate in the scale of the right-hand side."""
        vector = scaled(scaled(self.x, self._norm), self._peak)
        return Solution(vector, self.residual, self.stalled, self.products, self.low, self.high, self.history)


def dot(a: Vector, b: Vector) -> Tensor:
    """Return the B inner products of two vectors, in float64 on the device of the first part."""
    home = a[0].device
    return torch.stack([(x * y).sum(1).double().to(home) for x, y in zip(a, b, strict=True)]).sum(0)


def norm(a: Vector) -> Tensor:
    """Return the B norms of a vector."""
    return dot(a, a).sqrt()


def scaled(a: Vector, factors: Tensor) -> Vector:
    """Return the vector with each of the B rows multiplied by its factor."""
    return [t * factors[:, None].to(t) for t in a]


def combined(a: Vector, b: Vector, factors: Tensor) -> Vector:
    """Return ``a + factors b``, row by row."""
    return [torch.addcmul(x, y, factors[:, None].to(x)) for x, y in zip(a, b, strict=True)]


def inverse(values: Tensor) -> Tensor:
    """Return 1 / values, 0 where they are 0."""
    return torch.where(values != 0, 1 / torch.where(values != 0, values, 1.0), 0.0)
