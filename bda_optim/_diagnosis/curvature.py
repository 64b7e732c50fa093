"""Curvature of both levels along the rollout, and the directions in which the lower level does not move y."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._context.forward import surroundings
from .._support.types import InnerState
from .inner_loop import InnerLoop
from .lanczos import Spectrum, dense, lanczos
from .rates import nth, plain, travelled
from .sweep import norm

DENSE = 256
"""Below this number of parameters the lower Hessian is computed whole, if the products suffice."""

_EARLIER = 12
_LAST = 24


class Extremes(NamedTuple):
    """The largest and the lowest eigenvalue of a Hessian.

    Attributes:
        largest: The largest eigenvalue found; the true one is not smaller.
        lowest: The lowest eigenvalue found; the true one is not larger.
        interval: ``[lowest - residual, lowest]``: an eigenvalue lies in it, for all that is known the lowest one.
    """

    largest: float
    lowest: float
    interval: tuple[float, float]


class Flat(NamedTuple):
    """The directions that the lower level leaves (nearly) as they are in K steps.

    Attributes:
        threshold: The curvature below which a direction counts, ``ln 2 / sum_k lr_k``: half of the start is left.
        directions: Their number.
        error: The standard error of that number; 0 where it is exact.
        share: The part of ``|grad F|^2`` that lies in them.
        steepest: The largest curvature, with the rates as its metric where they differ.
        smallest: The smallest curvature that is not flat, in the same metric; infinite if there is none.
        density: Pairs (eigenvalue, weight) of the lower Hessian.
        slope: The same for grad F: pairs (eigenvalue, share of |grad F|^2).
        uniform: Whether all elements have the same rate; if not, the curvatures are those of ``R^(1/2) H R^(1/2)``, R
            being the rates over their mean.
    """

    threshold: float
    directions: float
    error: float
    share: float
    steepest: float
    smallest: float
    density: tuple[tuple[float, float], ...]
    slope: tuple[tuple[float, float], ...]
    uniform: bool


class Curvature(NamedTuple):
    """All that products with Hessians say.

    Attributes:
        lower: Of the lower level at y_K, on the last batch.
        upper: Of the upper level at y_K.
        lower_path: Pairs (k, L_f) along the rollout.
        upper_path: Pairs (k, L_F) along the rollout.
        upper_losses: Pairs (k, F) along the rollout.
        flat: None for a rule whose steps are not proportional to the gradient.
        products: How many products it took.
    """

    lower: Extremes
    upper: Extremes
    lower_path: tuple[tuple[int, float], ...]
    upper_path: tuple[tuple[int, float], ...]
    upper_losses: tuple[tuple[int, float], ...]
    flat: Flat | None
    products: int


class Hessian:
    """The Hessian of a loss at a point: one recorded gradient, and a second backward pass for each product.

    Args:
        loss: The loss as a function of flat parameters.
        params: The point.
        sign: -1 where the loss is maximised.
        decay: Per parameter a number that is added to the diagonal.
    """

    def __init__(
        self, loss: Callable[[Sequence[Tensor]], Tensor], params: Sequence[Tensor], *, sign: float = 1.0,
        decay: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        """Record the gradient."""
        self._sign, self._decay, self.products = sign, decay or [0.0] * len(params), 0
        self._points = [p.detach().requires_grad_() for p in params]
        self.size = sum(p.numel() for p in params)
        home = params[0]
        wide = home.device.type != "mps" and self.size <= _WIDE
        self.like = torch.empty(0, dtype=torch.float64 if wide else torch.float32, device=home.device)
        self.eps = max(torch.finfo(p.dtype).eps for p in params)
        with torch.enable_grad(), surroundings():
            value = loss(self._points)
            found: Sequence[Tensor | None] = [None] * len(params)
            if value.requires_grad:
                found = torch.autograd.grad(value, self._points, create_graph=True, allow_unused=True)
        self.value = float(value.detach())
        self._pairs = [(g, i) for i, g in enumerate(found) if g is not None and g.requires_grad]
        self.gradient = self._join(found)

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the product with a flat vector."""
        self.products += 1
        parts = self._divide(vector)
        found: Sequence[Tensor | None] = [None] * len(parts)
        if self._pairs:
            grads, seeds = zip(*((g, parts[i]) for g, i in self._pairs), strict=True)
            found = torch.autograd.grad(grads, self._points, seeds, retain_graph=True, allow_unused=True)
        product = self._sign * self._join(found)
        if any(self._decay):
            product = product + self._join([d * part for d, part in zip(self._decay, parts, strict=True)])
        if not bool(torch.isfinite(product).all()):
            raise FloatingPointError(
                "the second derivative of a loss is not finite at an iterate; got inf or NaN in a product with the "
                "Hessian. Check the loss for a square root or a power at 0, or start elsewhere."
            )
        return product

    def random(self, generator: torch.Generator) -> Tensor:
        """Return a vector of independent normal numbers."""
        return torch.randn(self.size, dtype=torch.float64, generator=generator).to(self.like)

    def _divide(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([p.numel() for p in self._points])
        return [part.to(p.dtype).reshape(p.shape) for part, p in zip(parts, self._points, strict=True)]

    def _join(self, parts: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(parts, self._points, strict=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).detach().reshape(-1).to(self.like) for g, p in pairs]
        )


_WIDE = 2**20
"""The largest number of parameters for which Lanczos vectors are kept in float64."""


class Allowance(NamedTuple):
    """How many products each part may take.

    Attributes:
        earlier: One Hessian at an iterate before y_K.
        lower: The lower Hessian at y_K.
        upper: The upper Hessian at y_K.
        run: Each Lanczos run from grad F or from a probe; 1.5 sqrt(K) resolve the threshold of flatness.
        dense: Whether the lower Hessian at y_K is computed whole.
    """

    earlier: int
    lower: int
    upper: int
    run: int
    dense: bool

    @classmethod
    def divide(cls, products: int | None, *, size: int, steps: int, probes: int, points: int) -> Allowance:
        """Divide `products`, by default ``120 + (1 + probes) max(24, 1.5 sqrt(K))``; `points` iterates precede y_K."""
        run = max(_LAST, int(1.5 * math.sqrt(steps)))
        default = 2 * _LAST + 6 * _EARLIER + (1 + probes) * run
        total = products or default
        earlier, last, run = (max(2, part * total // default) for part in (_EARLIER, _LAST, run))
        needed = size + min(size, last)
        if size >= DENSE or needed > total:
            return cls(earlier, last, last, run, False)
        earlier = min(earlier, (total - needed) // (2 * points)) if points else 0
        return cls(earlier, size, min(size, total - size - 2 * points * earlier), 0, True)


def curvature(
    loop: InnerLoop, states: dict[int, InnerState], *, products: int | None, probes: int, seed: int,
    stage: Callable[[str, int], Callable[[int], None]],
) -> Curvature:  # fmt: skip
    """Measure both Hessians at the given states, the last of which is y_K."""
    advance = stage("curvature", len(states))
    generator = torch.Generator().manual_seed(seed)
    *before, end = sorted(states)
    size = sum(p.numel() for p in loop.state.params)
    allowance = Allowance.divide(products, size=size, steps=loop.steps, probes=probes, points=len(before))
    lower_path, upper_path, upper_losses, count = [], [], [], 0
    for k in before:
        f, big_f = _hessians(loop, states[k])
        upper_losses.append((k, big_f.value))
        if allowance.earlier:
            lower_path.append((k, float(_run(f, allowance.earlier, generator).values[-1])))
            upper_path.append((k, float(_run(big_f, allowance.earlier, generator).values[-1])))
        count += f.products + big_f.products
        advance(1)
    f, big_f = _hessians(loop, states[end])
    upper = _extremes([_run(big_f, allowance.upper, generator)], big_f)
    spread = _spread(loop, f)
    if allowance.dense:
        lower, flat = _whole(f, big_f.gradient, spread)
    else:
        runs = [_run(f, allowance.lower, generator)]
        flat = None if spread is None else _sampled(f, big_f.gradient, spread, allowance.run, probes, generator, runs)
        lower = _extremes(runs, f)
    advance(1)
    return Curvature(
        lower, upper, (*lower_path, (end, lower.largest)), (*upper_path, (end, upper.largest)),
        (*upper_losses, (end, big_f.value)), flat, count + f.products + big_f.products,
    )  # fmt: skip


def _hessians(loop: InnerLoop, state: InnerState) -> tuple[Hessian, Hessian]:
    hyper = [value.detach() for value in loop.hyper]
    decay, sign = [0.0] * len(loop.names), 1.0
    if loop.rule.name == "SGD":  # what it descends on has these in it
        for members, settings in loop.groups:
            sign = -1.0 if settings["maximize"] else 1.0
            for place, i in enumerate(members):
                decay[i] = plain(nth(settings["weight_decay"], place))
    last = loop.items[loop.steps - 1]
    lower = Hessian(lambda y: loop.lower(y, state.buffers, hyper, last), state.params, sign=sign, decay=decay)
    return lower, Hessian(lambda y: loop.upper(y, state.buffers, hyper), state.params)


class _Spread(NamedTuple):
    """The metric in which directions are flat: the mean rate over all steps, and each element's rate over the mean."""

    mean: float
    root: Tensor | None


def _spread(loop: InnerLoop, hessian: Hessian) -> _Spread | None:
    rates = travelled(loop)
    if rates is None:
        return None
    flat = torch.cat([
        (rate if isinstance(rate, Tensor) else torch.tensor(rate)).to(hessian.like).expand(p.shape).reshape(-1)
        for rate, p in zip(rates, loop.state.params, strict=True)
    ])  # fmt: skip
    mean = float(flat.mean())
    if not mean > 0:
        return None
    same = bool((flat == flat[0]).all())
    return _Spread(mean, None if same else (flat / mean).clamp(min=0).sqrt())


def _run(hessian: Hessian, limit: int, generator: torch.Generator) -> Spectrum:
    return lanczos(hessian, hessian.random(generator), limit, hessian.eps)


def _extremes(runs: Sequence[Spectrum], hessian: Hessian) -> Extremes:
    largest = max(float(run.values[-1]) for run in runs)
    best = min(runs, key=lambda run: float(run.values[0]))
    lowest = float(best.values[0])
    rounding = 10 * hessian.eps * max(abs(largest), abs(lowest))
    return Extremes(largest, lowest, (lowest - float(best.residuals[0]) - rounding, lowest + rounding))


def _whole(hessian: Hessian, slope: Tensor, spread: _Spread | None) -> tuple[Extremes, Flat | None]:
    """Return what all eigenvalues of the lower Hessian say."""
    matrix = dense(hessian, hessian.size, hessian.like)
    values = torch.linalg.eigvalsh(matrix)
    exact = Spectrum(values, torch.ones_like(values), torch.zeros_like(values))
    extremes = _extremes([exact], hessian)
    if spread is None:
        return extremes, None
    slope = slope.double().cpu()
    if spread.root is not None:
        root = spread.root.double().cpu()
        matrix, slope = root[:, None] * matrix * root, root * slope
    values, vectors = torch.linalg.eigh(matrix)
    weights = (vectors.T @ slope) ** 2
    total = float(weights.sum())
    weights = weights / total if total > 0 else torch.zeros_like(weights)
    threshold = math.log(2) / spread.mean
    flat = values <= threshold
    return extremes, Flat(
        threshold, float(flat.sum()), 0.0, float(weights[flat].sum()), float(values[-1]),
        _smallest([values], threshold), _pairs(values, torch.full_like(values, 1 / len(values))),
        _pairs(values, weights), spread.root is None,
    )  # fmt: skip


def _sampled(
    hessian: Hessian, slope: Tensor, spread: _Spread, limit: int, probes: int, generator: torch.Generator,
    runs: list[Spectrum],
) -> Flat:  # fmt: skip
    """Return what Lanczos runs from grad F and from random probes say; they are added to `runs` in a plain metric."""
    root, threshold = spread.root, math.log(2) / spread.mean

    def product(v: Tensor) -> Tensor:
        return hessian(v) if root is None else root * hessian(root * v)

    steep = slope if root is None else root * slope
    size = norm([steep])
    along = lanczos(product, steep / size, limit, hessian.eps) if size > 0 else None
    tried = [lanczos(product, hessian.random(generator), limit, hessian.eps) for _ in range(probes)]
    every = tried if along is None else [along, *tried]
    if root is None:
        runs += every
    share = 0.0 if along is None else along.below(threshold)
    part = sum(run.below(threshold) for run in tried) / probes
    count = part * hessian.size
    error = math.sqrt(2 * count * (1 - part) / probes)
    density = [(v, w / probes) for run in tried for v, w in _pairs(run.values, run.weights)]
    values = [run.values for run in every]
    steepest = max(float(v[-1]) for v in values)
    return Flat(
        threshold, count, error, share, steepest, _smallest(values, threshold), tuple(sorted(density)),
        () if along is None else _pairs(along.values, along.weights), root is None,
    )  # fmt: skip


def _smallest(values: Sequence[Tensor], threshold: float) -> float:
    above = [float(v) for some in values for v in some if v > threshold]
    return min(above, default=math.inf)


def _pairs(values: Tensor, weights: Tensor) -> tuple[tuple[float, float], ...]:
    return tuple(zip(values.tolist(), weights.tolist(), strict=True))
