"""What the measurements mean: each finding has a code, a level, a sentence and advice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._adjoints.implicit import Implicit
from .._adjoints.unroll import Truncated
from .curvature import Curvature
from .inner_loop import InnerLoop
from .rates import is_scale_free, largest, plain
from .sweep import Sweep, distance

REMEMBERED = 0.1
"""With alpha = 0 a larger part of the start is too much."""

FORGOTTEN = 0.05
"""With alpha > 0 the part of the start that may be left."""

BIASED = 0.1
"""The largest alpha_K kappa_f: the last weight biases the hypergradient by about so much."""

UNSETTLED = 0.1
"""The largest relative change of the hypergradient from K/2 to K steps."""

EXPLODED = 1e3
"""Adjoints larger than this, over the last one, have exploded."""

QUESTION = (
    "alpha chooses y for F: is y_K what you will use, or is it refitted? Where y is refitted later from the lower loss "
    "alone (distilled data, few-shot heads, cleaned labels), keep alpha=0."
)


class Finding(NamedTuple):
    """Something that the user should know.

    Attributes:
        code: A word to test for: "start", "weak-alpha", "strong-alpha", "rate", "not-convex", "sigma", "explodes",
            "scale-free-rule", "short-K" or "truncated".
        level: "error" where the hypergradient is not what it is taken for, "warning", or "note".
        sentence: What was measured.
        advice: What to do.
    """

    code: str
    level: str
    sentence: str
    advice: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """What is known of a rollout when the findings are made.

    Attributes:
        loop: The rollout.
        sweep: Its backward sweep.
        half: The sweep of the first K/2 steps alone; None where K = 1.
        curvature: Both Hessians.
        adjoint: What the user means to differentiate with, or None.
    """

    loop: InnerLoop
    sweep: Sweep
    half: Sweep | None
    curvature: Curvature
    adjoint: Any = None

    @property
    def change(self) -> float | None:
        """The relative change of the hypergradient from K/2 to K steps; None where there are not both."""
        return None if self.half is None else change(self.half, self.sweep)

    @property
    def settles(self) -> bool:
        """Whether the adjoint moves y_K to the fixed point: then it matters neither where y started nor how long."""
        return isinstance(self.adjoint, Implicit) and self.adjoint.settle > 0

    @property
    def truncated(self) -> int | None:
        """T, if the adjoint differentiates the last T steps only."""
        return self.adjoint.last if isinstance(self.adjoint, Truncated) else None

    @property
    def last_weight(self) -> float:
        """alpha_K, the largest over the groups; for `Implicit(alpha=a)` it is a."""
        if isinstance(self.adjoint, Implicit) and self.adjoint.alpha is not None:
            return self.adjoint.alpha
        return max(largest(alpha, 1) for alpha in self.loop.weights(self.loop.steps))

    @property
    def condition(self) -> float | None:
        """kappa_f: the largest curvature of f over the smallest one that is not flat at this K."""
        flat = self.curvature.flat
        if flat is None or not math.isfinite(flat.smallest):
            return None
        return flat.steepest / flat.smallest

    @property
    def precision(self) -> float:
        """The rounding error of the parameters' dtype."""
        return max(torch.finfo(p.dtype).eps for p in self.loop.state.params)

    @property
    def not_convex(self) -> bool:
        """Whether the lower level has a direction of negative curvature at y_K."""
        lower = self.curvature.lower
        return lower.lowest < -max(1e-3, 10 * self.precision) * abs(lower.largest)

    @property
    def strongly_convex(self) -> bool:
        """Whether the upper level's lowest curvature is positive, as far as the dtype tells."""
        upper = self.curvature.upper
        return upper.lowest > 10 * self.precision * abs(upper.largest)

    @property
    def exploded(self) -> bool:
        """Whether adjoints explode on the way back."""
        return self.sweep.growth > EXPLODED

    @property
    def steps_to_forget(self) -> float:
        """How many steps alpha = 0 needs until 5 % of the start are left: infinite where a direction stays flat."""
        flat, lower = self.curvature.flat, self.curvature.lower
        if flat is None or lower.interval[0] <= max(1e-6, 100 * self.precision) * lower.largest:
            return math.inf
        lowest = min(flat.smallest, *(value for value, _ in flat.density))
        return math.log(1 / FORGOTTEN) / lowest * flat.threshold / math.log(2) * self.loop.steps


def change(before: Sweep, after: Sweep) -> float | None:
    """Return how far two hypergradients are apart, over the norm of the second; None without upper variables."""
    if before.gradient is None or after.gradient is None:
        return None
    return distance(before.gradient, after.gradient)


def findings(measured: Measured) -> tuple[Finding, ...]:
    """Return all that applies."""
    parts = (_start, _alpha, _rates, _shape, _adjoints, _length)
    return tuple(finding for part in parts for finding in part(measured))


def _start(measured: Measured) -> Iterator[Finding]:
    start = measured.sweep.start
    if measured.exploded or measured.settles or measured.loop.start_is_upper:
        return
    sentence = f"|dF/dy_0| / |dF/dy_K| = {start:.2g}: y_K remembers y_0"
    if measured.loop.aggregates():
        if start > FORGOTTEN:
            advice = "Double the constant of alpha (or raise upper_lr to its limit), or raise K."
            yield Finding("weak-alpha", "warning", f"{sentence}, although alpha > 0.", advice)
    elif start > REMEMBERED:
        steps = measured.steps_to_forget
        if math.isfinite(steps):
            advice = f"The lower level has a single solution: K = {math.ceil(steps)} steps forget the start."
        else:
            advice = f"Try alpha=harmonic(0.5), or the suggestion. {QUESTION}"
        yield Finding("start", "error", f"{sentence}, and alpha=0 leaves the choice to the start.", advice)


def _alpha(measured: Measured) -> Iterator[Finding]:
    if not measured.loop.aggregates():
        return
    if is_scale_free(measured.loop):
        yield Finding(
            "scale-free-rule", "error",
            f"steps of {measured.loop.rule.name} have the same length however flat f is, and alpha > 0: y settles "
            "where both levels' steps balance, whatever x is, and the hypergradient tends to 0.",
            "Use SGD, with momentum if need be, or alpha=0.",
        )  # fmt: skip
    condition, weight = measured.condition, measured.last_weight
    if condition is not None and weight * condition > BIASED:
        yield Finding(
            "strong-alpha", "warning",
            f"alpha_K kappa_f = {weight:.2g} x {condition:.3g} = {weight * condition:.2g}: the last weight biases the "
            "hypergradient by about as much.",
            "Raise K with a schedule that falls, as harmonic(c), or lower its constant.",
        )  # fmt: skip


def _rates(measured: Measured) -> Iterator[Finding]:
    factor, limit = lower_rate(measured)
    if factor is not None and factor > limit * (1 + 1e-3):
        level = "error" if factor > 2 * limit else "warning"
        advice = f"Lower lr to at most {limit / factor:.2g} of what it is."
        yield Finding(
            "rate", level, f"lr L_f = {factor:.3g} exceeds {limit:.3g}, where the lower step is stable.", advice
        )
    rate, bound = upper_rate(measured)
    if rate is not None and rate > bound * (1 + 1e-3):
        sentence = f"upper_lr = {rate:.3g} exceeds 2 / (L_F + sigma) = {bound:.3g}."
        yield Finding("rate", "warning", sentence, f"Use upper_lr={bound:.2g} or less.")


def lower_rate(measured: Measured) -> tuple[float | None, float]:
    """Return lr L_f, the largest over the rollout, and its limit; None for a rule that has none."""
    loop, flat = measured.loop, measured.curvature.flat
    if flat is None:
        return None, 1.0
    settings = [group for _, group in loop.groups]
    momentum = max(_number(group.get("momentum", 0.0)) for group in settings)
    limit = 1.0
    if momentum > 0:
        limit = 2 * (1 + momentum)
        if any(group.get("nesterov") for group in settings):
            limit /= 1 + 2 * momentum
    if flat.uniform:
        rate = max(largest(group["lr"], loop.steps) for group in settings)
        return rate * max(value for _, value in measured.curvature.lower_path), limit
    return flat.steepest * math.log(2) / flat.threshold / loop.steps * (1 - momentum), limit


def upper_rate(measured: Measured) -> tuple[float | None, float]:
    """Return the largest upper_lr and its limit 2 / (L_F + sigma); None where alpha = 0."""
    sigma = max(0.0, measured.curvature.upper.lowest)
    smooth = max(value for _, value in measured.curvature.upper_path)
    limit = 2 / (smooth + sigma) if smooth > 0 else math.inf
    if not measured.loop.aggregates():
        return None, limit
    rates = [group["lr"] if group["upper_lr"] is None else group["upper_lr"] for _, group in measured.loop.groups]
    return max(largest(rate, measured.loop.steps) for rate in rates), limit


def _shape(measured: Measured) -> Iterator[Finding]:
    lower, upper = measured.curvature.lower, measured.curvature.upper
    if measured.not_convex:
        yield Finding(
            "not-convex", "warning",
            f"the lower Hessian at y_K has the eigenvalue {lower.lowest:.3g} (the largest is {lower.largest:.3g}).",
            "The theory of BDA does not cover this; learn the initialisation as well, or run longer.",
        )  # fmt: skip
    if not measured.strongly_convex:
        yield Finding(
            "sigma", "note",
            f"the upper Hessian at y_K has the eigenvalue {upper.lowest:.3g} (the largest is {upper.largest:.3g}): F "
            "is not strongly convex in y.",
            "`theory(...)` does not apply; use `harmonic(c)`.",
        )  # fmt: skip


def _adjoints(measured: Measured) -> Iterator[Finding]:
    if measured.exploded and not isinstance(measured.adjoint, Implicit):
        yield Finding(
            "explodes", "error",
            f"adjoints grow by {measured.sweep.growth:.1e} on the way back: the exact hypergradient of y_K is "
            "rounding, or a number that no upper step can use.",
            "Lower lr, use a rule whose steps vanish with the gradient (SGD), raise eps, or use fewer steps.",
        )  # fmt: skip
    bias = measured.sweep.truncation.get(measured.truncated or 0)
    if bias is not None and bias > 0.01:
        yield Finding(
            "truncated", "warning",
            f"Truncated(last={measured.truncated}) is off by {bias:.2g} of the exact hypergradient.",
            "Differentiate more steps, or use an exact adjoint.",
        )  # fmt: skip


def _length(measured: Measured) -> Iterator[Finding]:
    moving = measured.change is not None and measured.change > UNSETTLED
    if moving and not measured.exploded and not measured.settles:
        yield Finding(
            "short-K", "warning",
            f"K/2 and K steps differ by {measured.change:.2g} of the hypergradient: it has not settled.",
            "Raise K, or lr up to its limit. alpha does not help where the lower level is slow.",
        )  # fmt: skip


def _number(value: object) -> float:
    found = plain(value)
    return float(found.max()) if isinstance(found, Tensor) else float(found)
