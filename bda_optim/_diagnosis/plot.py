"""The figure of a diagnosis: adjoints and truncation, the spectrum of the lower level, the losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from .findings import REMEMBERED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .report import Diagnosis

BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
GREY = "#666666"

FLOOR = 1e-16
"""Smaller numbers are drawn here."""

BINS = 25

STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}

Pairs = tuple[tuple[float, float], ...]


def plot(report: Diagnosis, path: str | PathLike[str]) -> None:
    """Write the figure as a PNG.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        sentence = "`plot` draws with matplotlib, which is not installed. Install it, or use `as_dict()`."
        raise ImportError(sentence) from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(16, 4.8), layout="constrained")
        left, middle, right = figure.subplots(1, 3, gridspec_kw={"wspace": 0.06})
        _adjoints(left, report)
        _spectrum(middle, report)
        _losses(right, report)
        chosen = ", ".join(f"{name}={value}" for name, value in report.settings.items())
        figure.suptitle(f"K = {report.steps}, {chosen}", fontsize=13)
        figure.savefig(path, dpi=120)


def _adjoints(axes: Axes, report: Diagnosis) -> None:
    """How much of dF/dy_K arrives at step k, and what a truncation there would cost."""
    norms = [_drawn(value) for value in report.adjoint_norms]
    axes.semilogy(range(len(norms)), norms, color=BLUE, linewidth=2, label="$|dF/dy_k| \\;/\\; |dF/dy_K|$")
    axes.plot(0, norms[0], "o", color=BLUE, clip_on=False, zorder=3)
    if report.truncation:
        cuts = [report.steps - last for last in report.truncation]
        biases = [_drawn(bias) for bias in report.truncation.values()]
        axes.plot(cuts, biases, "s--", color=ORANGE, markersize=5, label="bias of Truncated(T), cut at $k = K - T$")
    axes.axhline(
        REMEMBERED, color=GREY, linewidth=1, linestyle=":", label=f"{REMEMBERED:g}: above it, $y_K$ remembers $y_0$"
    )
    low = min([*norms, *(_drawn(bias) for bias in report.truncation.values())])
    axes.set_ylim(bottom=min(0.03, 0.5 * low))
    axes.set_xlim(0, report.steps)
    axes.set_xlabel("$k$")
    axes.set_title(f"The start: {report.start:.2g} of dF/dy is left at $k = 0$")
    axes.legend(loc="best", fontsize=9)


def _spectrum(axes: Axes, report: Diagnosis) -> None:
    """Where the directions of y lie on the axis of curvature, and where grad F does."""
    if report.flat_threshold is None or report.flat_directions is None or report.flat_share is None:
        axes.text(0.5, 0.5, "not measured:\nthe steps of this rule are not\nproportional to the gradient", ha="center")
        axes.set_axis_off()
        return
    unit = report.flat_threshold / 10
    values = [value for value, _ in (*report.lower_density, *report.slope_density)]
    low = min(_bent(min(values), unit), -0.2)
    high = max(_bent(max(values), unit), _bent(report.flat_threshold, unit)) + 0.1
    width = (high - low) / BINS
    edges = [low + width * i for i in range(BINS)]
    pairs = ((report.lower_density, BLUE, "directions of y"), (report.slope_density, ORANGE, "$|\\partial_y F|^2$"))
    highest = 0.0
    for place, (density, color, label) in enumerate(pairs):
        heights = _histogram(density, low, width, unit)
        highest = max(highest, *heights)
        axes.bar([e + (place + 0.5) * 0.45 * width for e in edges], heights, 0.45 * width, color=color, label=label)
    axes.axvspan(low, _bent(report.flat_threshold, unit), color="#f0e442", alpha=0.25, zorder=0, label="flat at this K")
    ticks = _ticks(low, high, unit)
    axes.set_xticks([_bent(tick, unit) for tick in ticks], [_power(tick) for tick in ticks])
    axes.set_xlim(low, high + width)
    axes.set_ylim(0, min(1.1, 1.3 * highest))
    axes.set_xlabel("eigenvalue of the lower Hessian at $y_K$")
    axes.set_ylabel("share")
    axes.set_title(
        f"Open: {report.flat_directions:.3g} of {report.parameters} directions, "
        f"{100 * report.flat_share:.2g} % of $|\\partial_y F|^2$"
    )
    axes.legend(loc="best", fontsize=9)


def _losses(axes: Axes, report: Diagnosis) -> None:
    """Both losses along the rollout, each on its own axis."""
    axes.plot(range(len(report.lower_losses)), report.lower_losses, color=BLUE, linewidth=2)
    axes.set_xlabel("$k$")
    axes.set_xlim(0, report.steps)
    axes.set_ylabel("lower loss $f$", color=BLUE)
    _scale(axes, report.lower_losses)
    other = axes.twinx()
    upper = [value for _, value in report.upper_losses]
    style = "-" if len(upper) > 4 else "o--"
    other.plot([k for k, _ in report.upper_losses], upper, style, color=ORANGE, linewidth=2, clip_on=False)
    other.set_ylabel("upper loss $F$", color=ORANGE)
    other.grid(False)
    other.spines["right"].set_visible(True)
    _scale(other, upper)
    axes.set_title("The losses along the rollout")


def _scale(axes: Axes, values: Sequence[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > 50 * min(finite):
        axes.set_yscale("log")


def _drawn(value: float) -> float:
    return min(max(value, FLOOR), 1e300) if math.isfinite(value) else 1e300


def _bent(value: float, unit: float) -> float:
    """Return a coordinate that is linear within `unit` of 0 and logarithmic beyond."""
    return math.copysign(math.log10(1 + abs(value) / unit), value)


def _histogram(density: Pairs, low: float, width: float, unit: float) -> list[float]:
    heights = [0.0] * BINS
    for value, weight in density:
        heights[min(BINS - 1, max(0, int((_bent(value, unit) - low) / width)))] += weight
    return heights


def _power(tick: float) -> str:
    return f"${'-' if tick < 0 else ''}10^{{{round(math.log10(abs(tick)))}}}$" if tick else "0"


def _ticks(low: float, high: float, unit: float) -> list[float]:
    """Return 0 and the powers of ten that the axis shows, at most seven."""
    first = math.ceil(math.log10(unit))
    powers = [10.0**n for n in range(first, first + 12) if _bent(10.0**n, unit) <= high]
    powers = powers[:: max(1, math.ceil(len(powers) / 6))]
    return [*(-power for power in powers if _bent(-power, unit) >= low), 0.0, *powers]
