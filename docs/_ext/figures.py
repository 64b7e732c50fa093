"""The figures of the pages that no example draws: made when the docs are built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import experiments
import matplotlib
import records
import torch
from matplotlib.figure import Figure
from torch import Tensor

import bda_optim as bda

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "legend.frameon": False}
PROBLEM: dict[str, Any] = {"steps": 64, "lr": 0.2, "upper_lr": 0.7}
WEIGHTS = {"alpha = 0": (0.0, BLUE), "BDA, alpha = 0.5/k": (bda.harmonic(0.5), ORANGE)}


def lower(y: Tensor, x: Tensor, batch: None) -> Tensor:
    return (0.5 * y[0] ** 2 - x * y[0]).sum()  # a column of y, and an element of x, is a problem of its own


def upper(y: Tensor, x: Tensor, batch: None) -> Tensor:
    return value(y, x).sum()


def value(y: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2


def path(x: float, start: tuple[float, float], alpha: Any) -> Tensor:
    """Return y_0, ..., y_K of the counter-example at one x."""
    points = [torch.tensor(start, dtype=torch.float64)]
    for k in range(1, PROBLEM["steps"] + 1):
        settings = {**PROBLEM, "steps": 1, "alpha": alpha(k) if callable(alpha) else alpha}
        points.append(bda.rollout(lower, upper, points[-1], torch.tensor(x, dtype=torch.float64), **settings))
    return torch.stack(points)


def ends(xs: Tensor, start: tuple[float, float], alpha: Any) -> Tensor:
    """Return F(x, y_K(x)) at every x."""
    y0 = torch.tensor(start, dtype=torch.float64)[:, None].expand(2, len(xs))
    return value(bda.rollout(lower, upper, y0, xs, **PROBLEM, alpha=alpha), xs)


@torch.no_grad()
def method() -> Figure:
    """Draw where the inner loop goes at one x, and what the search for x then sees."""
    starts, xs = [(2.0, 2.0), (0.0, -0.6), (1.9, 0.9)], torch.linspace(-0.5, 2.5, 61, dtype=torch.float64)
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(9.6, 3.7), layout="constrained")
        left, right = fig.subplots(1, 2)
        left.axvline(0.4, color=GREY, linewidth=4, alpha=0.25, label="solutions of the lower level")
        for name, (alpha, color) in WEIGHTS.items():
            for number, start in enumerate(starts):
                label = None if number else name
                points = path(0.4, start, alpha)
                left.plot(*points.T, ".-", color=color, linewidth=1, markersize=3)
                left.plot(*points[-1], "o", color=color, markersize=6, label=label)
                right.plot(xs, ends(xs, start, alpha), color=color, linewidth=1.5, label=label)
        left.plot(0.4, 0.4, "*", color="black", markersize=12, label="the one that F prefers")
        left.set(xlabel="$y_1$", ylabel="$y_2$", title="The inner loop at $x = 0.4$, from three starts")
        right.plot(xs, (xs - 1) ** 2 / 2, ":", color="black", linewidth=2.5, label="optimistic value function")
        right.axvline(1, color=GREY, linewidth=1, linestyle="dashed")
        right.set(xlabel="$x$", ylabel="$F(x, y_K(x))$", title="What the search for $x$ sees", ylim=(-0.1, 4))
        left.legend(fontsize=8)
        right.legend(fontsize=8)
    return fig


def adjoints() -> Figure:
    """Draw memory and time of each adjoint against K."""
    found = records.read(records.BENCHMARKS / "adjoints_vs_k.json")
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(9, 4.6), layout="constrained")
        axes = fig.subplots(1, 2)
        for number, (name, row) in enumerate(found["adjoints"].items()):
            for axis, key in zip(axes, ("peak_growth_mib", "time"), strict=True):
                points = [(k, v) for k, v in zip(found["steps"], row[key], strict=True) if v is not None]
                axis.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=name, markersize=4)
        for axis, label in zip(axes, ("peak growth, MiB", "time over that of K plain steps"), strict=True):
            axis.set(xlabel="K", xscale="log", yscale="log", ylabel=label)
            axis.set_xticks(found["steps"], labels=map(str, found["steps"]), minor=False)
            axis.minorticks_off()
            axis.grid(color="#ececec")
        fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    return fig


def few_shot() -> Figure:
    """Draw the validation losses of the few-shot runs."""
    found = [records.read(path) for path in sorted(records.EXPERIMENTS.glob("few_shot_*.json"))]
    found.sort(key=lambda run: (run["settings"]["dataset"] != "omniglot", run["settings"]["ways"]))
    return experiments.script("_few_shot_report").curves(found)


FIGURES: dict[str, Callable[[], Figure]] = {"adjoints": adjoints, "few_shot": few_shot, "method": method}
