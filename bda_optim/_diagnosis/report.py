"""The report of a diagnosis: plain numbers, findings, a suggestion, and how they print."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

from .findings import Finding, Measured, lower_rate, upper_rate
from .plot import plot
from .suggestion import Suggestion, amount

Pairs = tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis:
    r"""What `diagnose` found; every field is a plain number, or a tuple or dict of them.

    Attributes:
        settings: The settings diagnosed, as text.
        steps: K, the number of inner steps.
        parameters: The number of lower scalars.
        upper_scalars: P, the number of upper scalars.
        value: F(x, y_K).
        start: :math:`|dF/dy_0| / |dF/dy_K|`, how much of the start y_K remembers. Exact.
        truncation: T -> the relative bias of `Truncated(T)`, T = 1, 2, 4, ... below K. Exact; empty where the start is
            an upper variable, which `Truncated` refuses.
        max_growth: The largest adjoint over the last one.
        adjoint_norms: :math:`|dF/dy_k| / |dF/dy_K|` for k = 0..K.
        change: How far the hypergradients of K/2 and K steps are apart, over the norm of the latter.
        last_weight: alpha_K, the largest over the groups.
        lower_rate: lr L_f, the largest over the rollout; None for rules other than gradient descent.
        lower_rate_limit: What it should not exceed: 1, with momentum 2 (1 + momentum).
        upper_rate: The largest upper_lr; None where alpha = 0.
        upper_rate_limit: What it should not exceed: 2 / (L_F + sigma).
        lower_smoothness: L_f, the largest eigenvalue of the lower Hessian at y_K, on the last batch. With SGD's
            `weight_decay` and `maximize`, which belong to what is minimised; without the prox.
        lower_lowest: Its lowest eigenvalue.
        lower_lowest_interval: Where an eigenvalue lies for certain, the lowest one as far as is known.
        lower_smoothness_path: Pairs (k, L_f) at k = 0, K/4, K/2, K.
        upper_smoothness: L_F, the largest eigenvalue of the upper Hessian at y_K.
        upper_strong_convexity: sigma, its lowest eigenvalue.
        upper_strong_convexity_interval: As for the lower level.
        upper_smoothness_path: Pairs (k, L_F).
        condition: kappa_f, L_f over the smallest curvature that is not flat; None where nothing is known of it.
        flat_threshold: The curvature below which a direction is flat at this K, :math:`\ln 2 / \sum_k s_k`: more than
            half of the start is left there. None for rules other than gradient descent, as the next three.
        flat_directions: The number of flat directions.
        flat_directions_error: Its standard error; 0 where it is exact.
        flat_share: The part of :math:`|\partial_y F|^2` that lies in flat directions.
        lower_density: Pairs (eigenvalue, weight) of the lower Hessian.
        slope_density: Pairs (eigenvalue, share of :math:`|\partial_y F|^2`).
        lower_losses: f at y_0, ..., y_{K-1}.
        upper_losses: Pairs (k, F).
        memory: Adjoint -> the bytes it will hold at its peak.
        products: How many products with Hessians were taken.
        step_evaluations: How many inner steps were evaluated, without the search for the suggestion.
        findings: What the user should know.
        suggestion: What to choose; None with ``suggest=False``.
    """

    settings: Mapping[str, str]
    steps: int
    parameters: int
    upper_scalars: int
    value: float
    start: float
    truncation: Mapping[int, float]
    max_growth: float
    adjoint_norms: tuple[float, ...]
    change: float | None
    last_weight: float
    lower_rate: float | None
    lower_rate_limit: float
    upper_rate: float | None
    upper_rate_limit: float
    lower_smoothness: float
    lower_lowest: float
    lower_lowest_interval: tuple[float, float]
    lower_smoothness_path: Pairs
    upper_smoothness: float
    upper_strong_convexity: float
    upper_strong_convexity_interval: tuple[float, float]
    upper_smoothness_path: Pairs
    condition: float | None
    flat_threshold: float | None
    flat_directions: float | None
    flat_directions_error: float | None
    flat_share: float | None
    lower_density: Pairs
    slope_density: Pairs
    lower_losses: tuple[float, ...]
    upper_losses: Pairs
    memory: Mapping[str, int]
    products: int
    step_evaluations: int
    findings: tuple[Finding, ...]
    suggestion: Suggestion | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON takes it; numbers that are not finite become strings."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        found["findings"] = [finding._asdict() for finding in self.findings]
        found["suggestion"] = None if self.suggestion is None else self.suggestion.as_dict()
        plain: dict[str, Any] = _plain(found)
        return plain

    def plot(self, path: str | PathLike[str]) -> None:
        """Write one PNG: adjoint norms and truncation, the spectrum of the lower level, the losses."""
        plot(self, path)

    def __repr__(self) -> str:
        codes = [finding.code for finding in self.findings]
        return f"Diagnosis(steps={self.steps}, start={self.start:.3g}, findings={codes})"

    def __str__(self) -> str:
        """Return the report as text."""
        return "\n".join(_lines(self))


def report(
    measured: Measured, settings: Mapping[str, str], memory: Mapping[str, int], scalars: int,
    findings: tuple[Finding, ...], evaluated: int,
) -> Diagnosis:  # fmt: skip
    """Put the measurements into a report, still without a suggestion."""
    swept, curved = measured.sweep, measured.curvature
    flat = curved.flat
    lower, lower_limit = lower_rate(measured)
    upper, upper_limit = upper_rate(measured)
    return Diagnosis(
        settings=settings, steps=measured.loop.steps, parameters=sum(p.numel() for p in measured.loop.state.params),
        upper_scalars=scalars, value=swept.value, start=swept.start, truncation=swept.truncation,
        max_growth=swept.growth, adjoint_norms=swept.norms, change=measured.change, last_weight=measured.last_weight,
        lower_rate=lower, lower_rate_limit=lower_limit, upper_rate=upper, upper_rate_limit=upper_limit,
        lower_smoothness=curved.lower.largest, lower_lowest=curved.lower.lowest,
        lower_lowest_interval=curved.lower.interval, lower_smoothness_path=curved.lower_path,
        upper_smoothness=curved.upper.largest, upper_strong_convexity=curved.upper.lowest,
        upper_strong_convexity_interval=curved.upper.interval, upper_smoothness_path=curved.upper_path,
        condition=measured.condition, flat_threshold=flat and flat.threshold, flat_directions=flat and flat.directions,
        flat_directions_error=flat and flat.error, flat_share=flat and flat.share,
        lower_density=flat.density if flat else (), slope_density=flat.slope if flat else (),
        lower_losses=tuple(float(record.lower) for record in swept.records), upper_losses=_upper_losses(measured),
        memory=memory, products=curved.products, step_evaluations=evaluated, findings=findings,
    )  # fmt: skip


def _upper_losses(measured: Measured) -> Pairs:
    """Return F along the rollout: at every step where it was evaluated, else where its curvature was measured."""
    recorded = [(k, record.upper) for k, record in enumerate(measured.sweep.records)]
    known = [(float(k), float(upper)) for k, upper in recorded if upper is not None]
    if not known:
        return tuple((float(k), value) for k, value in measured.curvature.upper_losses)
    return (*known, (float(measured.loop.steps), measured.sweep.value))


def _plain(value: Any) -> Any:
    """Return a value as strict JSON takes it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _lines(found: Diagnosis) -> list[str]:
    chosen = ", ".join(f"{name}={value}" for name, value in found.settings.items())
    head = f"diagnosis of K={found.steps} steps, {chosen}, {_count(found.parameters, 'parameter')}, "
    lines = [head + _count(found.upper_scalars, "upper scalar")]
    lines.append(f"start     |dF/dy_0| / |dF/dy_K| = {found.start:.2g}")
    lines.append(f"open      {_open(found)}")
    sigma = "sigma" if found.upper_strong_convexity > 0 else "lowest"
    lines.append(
        f"curvature f: L_f = {found.lower_smoothness:.4g}, lowest {found.lower_lowest:.3g}; "
        f"F: L_F = {found.upper_smoothness:.4g}, {sigma} {found.upper_strong_convexity:.3g}"
    )
    lines.append(f"rates     {_rates(found)}")
    if found.upper_rate is None:
        lines.append("alpha     0: the upper loss is not evaluated in the inner loop, and has no part in y_K")
    else:
        bias = "" if found.condition is None else f", alpha_K kappa_f = {found.last_weight * found.condition:.2g}"
        lines.append(f"alpha     alpha_K = {found.last_weight:.2g}{bias}")
    if found.change is not None:
        lines.append(f"settled   K/2 and K steps differ by {found.change:.2g} of the hypergradient")
    if found.truncation:
        lines.append("truncate  T: " + " | ".join(f"{T} {bias:.2g}" for T, bias in found.truncation.items()))
    lines.append(f"adjoints  largest {found.max_growth:.2g} of the last one")
    lines.append("memory    " + " | ".join(f"{name} {amount(size)}" for name, size in found.memory.items()))
    lines.append(f"cost      {_count(found.step_evaluations, 'step')}, {_count(found.products, 'product')}")
    for finding in found.findings:
        lines += ["", f"{finding.level} [{finding.code}] {finding.sentence}", f"    {finding.advice}"]
    if found.suggestion is not None:
        lines += ["", "suggestion", str(found.suggestion)]
    return lines


def _open(found: Diagnosis) -> str:
    if found.flat_directions is None or found.flat_share is None:
        return "not measured: the steps of this rule are not proportional to the gradient"
    error = f" +- {found.flat_directions_error:.2g}" if found.flat_directions_error else ""
    verb = "is" if found.flat_directions == 1 else "are"
    number = f"{found.flat_directions:.4g}{error} of {_count(found.parameters, 'direction')} {verb} flat at this K"
    return f"{number}; {100 * found.flat_share:.2g} % of |grad F|^2 lies there"


def _rates(found: Diagnosis) -> str:
    parts = []
    if found.lower_rate is not None:
        parts.append(f"lr L_f = {found.lower_rate:.3g} {_sign(found.lower_rate, found.lower_rate_limit)}")
    if found.upper_rate is not None:
        parts.append(f"upper_lr = {found.upper_rate:.3g} {_sign(found.upper_rate, found.upper_rate_limit)}")
    elif math.isfinite(found.upper_rate_limit):
        parts.append(f"upper_lr at most {found.upper_rate_limit:.3g}")
    return "; ".join(parts) or "no limit is known for this rule"


def _sign(value: float, limit: float) -> str:
    return f"{'<=' if value <= limit else '>'} {limit:.3g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
