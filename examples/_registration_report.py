"""The tables and the figure of registration.py."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

PLAIN, BDA, EXACT = "#0072B2", "#D55E00", "#222222"
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}


def to_optimum(found: Mapping[str, Any], run: Mapping[str, Any]) -> float:
    return math.dist(run["x"], found["optimum"]["x"])


def spread(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest distance between two returned x."""
    return max((math.dist(one["x"], other["x"]) for one, other in itertools.combinations(runs, 2)), default=0.0)


def extent(values: Sequence[float], digits: int) -> str:
    """Return the least and the largest."""
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def table(found: Mapping[str, Any]) -> str:
    """Return what came of one scene, in Markdown: a row per method, with the range over the starts."""
    count = len(dict.fromkeys(run["start"] for run in found["runs"]))
    lines = [
        f"| {found['scene']}; {count} starts | F(y_K) | x to the optimum, px | largest distance of two x, px | "
        "relative error of the image |",
        "|---|---:|---:|---:|---:|",
    ]
    for method in dict.fromkeys(run["method"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["method"] == method]
        name = f"{method}, alpha_k = {found['c']:g}/k" if method.startswith("BDA") else method
        cells = (
            extent([run["upper"] for run in runs], 2),
            extent([to_optimum(found, run) for run in runs], 3),
            f"{spread(runs):.3f}",
            extent([run["image_error"] for run in runs], 2),
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    optimum = found["optimum"]
    lines.append(f"| optimum | {optimum['upper']:.2f} | 0 | - | {optimum['image_error']:.2f} |")
    return "\n".join(lines)


def summary(scenes: Sequence[Mapping[str, Any]]) -> str:
    """Return what came of several images with the same prior, in Markdown: ranges over all images and starts."""
    lines = [
        f"| {len(scenes)} images | x to the optimum, px | largest distance of two x of an image, px | "
        "relative error of the image |",
        "|---|---:|---:|---:|",
    ]
    methods = dict.fromkeys(run["method"] for run in scenes[-1]["runs"])
    for method in methods:
        runs = [[run for run in found["runs"] if run["method"] == method] for found in scenes]
        pairs = [(found, run) for found, own in zip(scenes, runs, strict=True) for run in own]
        cells = (
            extent([to_optimum(found, run) for found, run in pairs], 3),
            extent([spread(own) for own in runs], 3),
            extent([run["image_error"] for _, run in pairs], 2),
        )
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    lines.append(f"| optimum | 0 | - | {extent([found['optimum']['image_error'] for found in scenes], 2)} |")
    return "\n".join(lines)


def tables(results: Mapping[str, Any]) -> str:
    """Return all scenes; where several images were run alike, their common ranges come first."""
    alike = [found for found in results["scenes"] if re.fullmatch(r"image \d+", found["scene"])]
    first = [summary(alike)] if len(alike) > 1 else []
    return "\n\n".join([*first, *(table(found) for found in results["scenes"])])


# --- the figure -------------------------------------------------------------------------------------------------------


def figure(found: Mapping[str, Any], picture: Mapping[str, Any]) -> Figure:
    """Draw F along a line, the returned x, the error of the hypergradient, and the images."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(11, 6.6), layout="constrained")
        above, below = fig.subfigures(2, 1, height_ratios=(1.55, 1))
        line, plane, errors = above.subplots(1, 3)
        draw_line(line, picture["line"], found["c"])
        draw_plane(plane, found, picture["plane"])
        draw_errors(errors, picture["errors"], found["c"])
        draw_images(below, found, picture["truth"])
    return fig


def images_figure(found: Mapping[str, Any], truth: Sequence[float]) -> Figure:
    """Draw the images alone: the truth, the optimum, and what both methods return from three starts."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(9.6, 1.9), layout="constrained")
        draw_images(fig, found, truth)
    return fig


def draw_line(ax: Any, line: Mapping[str, Any], c: float) -> None:
    for name, color in (("alpha = 0", PLAIN), ("BDA", BDA)):
        for curve in line[name]:
            ax.plot(line["t"], curve, color=color, linewidth=1.1)
    ax.plot(line["t"], line["phi"], color=EXACT, linewidth=2.2, linestyle=(0, (1, 1)))
    ax.set_yscale("log")
    ax.grid(color="#ececec")
    ax.set_xlabel(r"$x = t \cdot x^*$:  $t$")
    ax.set_title(f"What the search for $x$ sees: $F(y_K(x))$\nfrom {len(line['BDA'])} starts $y_0$", fontsize=10)
    handles = [
        Line2D([], [], color=PLAIN, label=r"$\alpha = 0$"),
        Line2D([], [], color=BDA, label=rf"BDA, $\alpha_k = {c:g}/k$"),
        Line2D([], [], color=EXACT, linewidth=2.2, linestyle=(0, (1, 1)), label=r"exact, $\varphi(x)$"),
    ]
    ax.legend(handles=handles, framealpha=0.9, edgecolor="none", fontsize=9)


def draw_plane(ax: Any, found: Mapping[str, Any], plane: Mapping[str, Any]) -> None:
    levels = torch.tensor(plane["phi"]).quantile(torch.linspace(0, 1, 13)).unique().tolist()
    if len(levels) > 1:
        ax.contour(plane["axis"], plane["axis"], plane["phi"], levels=levels, colors="#d0d0d0", linewidths=0.8)
    optimum = found["optimum"]["x"]
    ax.plot(optimum[1], optimum[0], "o", color=EXACT, markersize=15, markerfacecolor="none", markeredgewidth=1.3)
    ax.annotate("optimum", (optimum[1], optimum[0]), (10, 7), textcoords="offset points", fontsize=9)
    ax.plot(0, 0, "x", color=EXACT, markersize=7, markeredgewidth=1.4)
    ax.annotate("start of the search", (0, 0), (6, 6), textcoords="offset points", fontsize=9)
    for name, color, marker in (("alpha = 0", PLAIN, "o"), ("BDA", BDA, "D")):
        down, right = zip(*(run["x"] for run in found["runs"] if run["method"] == name), strict=True)
        ax.plot(right, down, marker, color=color, markersize=6, markeredgecolor="white", markeredgewidth=0.6)
    ax.set_aspect("equal")
    ax.set_xlabel("velocity to the right, px")
    ax.set_ylabel("velocity downwards, px")
    ax.set_title(r"The $x$ that it returns" + "\n(grey: contours of the exact $\\varphi$)", fontsize=10)


def draw_errors(ax: Any, errors: Mapping[str, Any], c: float) -> None:
    chosen = f"{c:g}/k"
    names = [name for name in errors if name != "steps"]
    for name, color, style in zip(names, (PLAIN, BDA, BDA, "#777777"), ("-", "--", "-", "-."), strict=True):
        text = r"$\alpha = 0$" if name == "alpha = 0" else rf"$\alpha_k = {name}$"
        note = " (chosen)" if name == chosen else ""
        ax.plot(errors["steps"], errors[name], style, color=color, marker="o", markersize=3.5, label=text + note)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(errors["steps"], [str(k) for k in errors["steps"]])
    ax.minorticks_off()
    ax.grid(color="#ececec")
    ax.set_xlabel("lower steps $K$")
    ax.set_title("Relative error of the hypergradient\n(worst of three starts)", fontsize=10)
    ax.legend(frameon=False, fontsize=9)


def draw_images(fig: Any, found: Mapping[str, Any], truth: Sequence[float]) -> None:
    panels = [("truth", EXACT, truth, None), ("optimum", EXACT, found["optimum"]["image"], found["optimum"])]
    starts = list(dict.fromkeys(run["start"] for run in found["runs"]))[:3]
    for name, color in (("alpha = 0", PLAIN), ("BDA", BDA)):
        for start in starts:
            (run,) = [run for run in found["runs"] if (run["method"], run["start"]) == (name, start)]
            label = r"$\alpha = 0$" if name == "alpha = 0" else name
            panels.append((f"{label}\n$y_0$: {start.split()[0]}", color, run["image"], run))
    side = math.isqrt(len(truth))
    for ax, (title, color, image, run) in zip(fig.subplots(1, len(panels)), panels, strict=True):
        ax.imshow(torch.tensor(image).view(side, side).numpy(), cmap="gray", vmin=0, vmax=1)
        ax.set_title(title, fontsize=9, color=color)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(True)
        ax.spines[:].set_color(color)
        if run is not None:
            ax.set_xlabel(f"error {100 * run['image_error']:.0f} %", fontsize=9, color=color)
