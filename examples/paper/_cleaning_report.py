"""The tables and figures of hyper_cleaning.py, drawn from the results as they are in its JSON file."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

PAPER = {  # Table 2, MNIST: K -> accuracy in %
    "RHG": {50: 88.96, 100: 89.73, 200: 90.13, 400: 90.19, 800: 90.15},
    "T-RHG": {50: 87.90, 100: 88.28, 200: 88.50, 400: 88.52, 800: 89.99},
    "BDA": {50: 89.12, 100: 90.12, 200: 90.57, 400: 90.81, 800: 90.86},
}
REPORTED = (
    ("accuracy", "Test accuracy of y_K in %", 2),
    ("lower_only", "Test accuracy in % of K steps on f alone, with the learned x", 2),
    ("f1", "F1 of finding the wrong labels", 4),
    ("retrained", "Test accuracy in % after retraining on the cleaned set", 2),
)
CONDUCT = (
    ("upper", "F(y_K), at the last x", 3),
    ("iterations", "Upper iterations", 0),
    ("change", "Change of F over the last 4 iterations in %", 1),
    ("seconds", "CPU time in s, one seed", 0),
)
COLORS = {"RHG": "#0072B2", "T-RHG": "#009E73", "BDA": "#D55E00", "RHG+val": "#777777"}
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}


def value(cell: Mapping[str, Any], key: str) -> Any:
    """Return what a run says of itself, or what follows from its curve."""
    upper = cell["curve"]["upper"]
    if key == "iterations":  # those that were taken, not those that were allowed
        return len(upper)
    if key == "change":
        window = upper[-5:]
        return 100 * (window[-1] / window[0] - 1)
    return cell[key]


def rows(results: Mapping[str, Any], key: str) -> dict[str, dict[int, list[Any]]]:
    """Return method -> K -> one value per seed."""
    found: dict[str, dict[int, list[Any]]] = {name: {} for name in COLORS}
    for cell in sorted(results["cells"], key=lambda cell: (cell["steps"], cell["seed"])):
        found[cell["method"]].setdefault(cell["steps"], []).append(value(cell, key))
    return {name: row for name, row in found.items() if row}


def paper(results: Mapping[str, Any], key: str, name: str) -> dict[int, float]:
    """Return K -> the paper's number, where it has one, for the K that were run."""
    theirs = PAPER.get(name, {}) if key == "accuracy" and results["settings"]["dataset"] == "mnist" else {}
    return {k: theirs[k] for k in sorted({cell["steps"] for cell in results["cells"]} & theirs.keys())}


def entry(found: Sequence[float], digits: int) -> str:
    """Mean, and standard deviation where there are several."""
    if not found:
        return "-"
    spread = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.{digits}f}{spread}"


def tables(results: Mapping[str, Any]) -> str:
    """Return the tables in Markdown."""
    lines, steps = [], sorted({cell["steps"] for cell in results["cells"]})
    absent = {"lower_only"} - results["cells"][0].keys()  # earlier results lack it
    for key, title, digits in [row for row in (*REPORTED, *CONDUCT) if row[0] not in absent]:
        lines += [f"| {title} |" + "".join(f" K = {k} |" for k in steps), "|---|" + "---:|" * len(steps)]
        for name, row in rows(results, key).items():
            lines.append(f"| {name} |" + "".join(f" {entry(row.get(k, []), digits)} |" for k in steps))
            if theirs := paper(results, key, name):
                lines.append(
                    f"| {name}, paper |" + "".join(f" {theirs[k]:.2f} |" if k in theirs else " - |" for k in steps)
                )
        lines.append("")
    for name in ("all labels", "right labels only"):
        lines.append(f"Plain training, {name}: {entry([row[name] for row in results['plain']], 2)} %.")
    return "\n".join(lines)


def accuracy_figure(results: Mapping[str, Any]) -> Figure:
    """Draw the four numbers against K; bars are standard deviations over seeds, dotted lines the paper's."""
    steps = sorted({cell["steps"] for cell in results["cells"]})
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(14, 8.4), layout="constrained")
        for ax, (key, title, _) in zip(fig.subplots(2, 2).flat, REPORTED, strict=True):
            for name, row in rows(results, key).items():
                means = [statistics.mean(found) for found in row.values()]
                bars = [statistics.stdev(found) if len(found) > 1 else 0.0 for found in row.values()]
                ax.errorbar(list(row), means, bars, color=COLORS[name], marker="o", ms=5, capsize=3, label=name)
                if theirs := paper(results, key, name):
                    ax.plot(list(theirs), list(theirs.values()), ":", color=COLORS[name], label=f"{name}, paper")
            ax.set_xscale("log", base=2)
            ax.set_xticks(steps, [str(k) for k in steps])
            ax.minorticks_off()
            ax.grid(color="#e6e6e6")
            ax.set_xlabel("lower steps $K$")
            ax.set_title(title.replace("y_K", "$y_K$"), fontsize=11)
        fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
        fig.suptitle(f"Hyper-cleaning, {results['settings']['dataset']}")
    return fig


def weights_figure(results: Mapping[str, Any], steps: int) -> Figure:
    """Draw histograms of sigmoid(x), over all seeds together."""
    bins = len(results["cells"][0]["weights"]["right"])
    found = {name: row[steps] for name, row in rows(results, "weights").items() if steps in row}
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(3.6 * len(found), 3.8), layout="constrained")
        edges = [number / bins for number in range(bins + 1)]
        for ax, name in zip(fig.subplots(1, len(found), sharey=True, squeeze=False)[0], found, strict=True):
            for kind, color in (("right", "#0072B2"), ("wrong", "#D55E00")):
                counts = torch.tensor([weights[kind] for weights in found[name]]).sum(0)
                ax.stairs(counts / counts.sum(), edges, fill=True, alpha=0.6, color=color, label=f"{kind} label")
            ax.set_yscale("log", nonpositive="clip")
            ax.set_ylim(1e-3, 1)
            ax.axvline(0.5, color="black", linewidth=0.8, linestyle=":")
            ax.set_title(name)
            ax.set_xlabel(r"learned weight $\sigma(x_i)$")
        fig.axes[0].set_ylabel("share of the samples")
        fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        fig.suptitle(f"Weights of right and wrong labels, {results['settings']['dataset']}, K = {steps}")
    return fig


def curves_figure(results: Mapping[str, Any]) -> Figure:
    """Draw F, the test accuracy of y_K and F1 against upper iterations, of the first seed of each K."""
    steps = sorted({cell["steps"] for cell in results["cells"]})
    titles = {"upper": "$F(y_K)$", "accuracy": "test accuracy of $y_K$, %", "f1": "F1"}
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(3.2 * len(steps) + 1, 8.4), layout="constrained")
        axes = fig.subplots(3, len(steps), sharex="col", sharey="row", squeeze=False)
        curves, best = rows(results, "curve"), max(cell["accuracy"] for cell in results["cells"])
        for (line, (key, title)), (column, k) in itertools.product(enumerate(titles.items()), enumerate(steps)):
            ax = axes[line][column]
            for name in [name for name in curves if k in curves[name]]:
                points = curves[name][k][0][key]
                ax.plot(range(len(points)), points, color=COLORS[name], label=name)
            ax.grid(color="#e6e6e6")
            if column == 0:
                ax.set_ylabel(title)
        for ax, k in zip(axes[0], steps, strict=True):
            ax.set_title(f"K = {k}", fontsize=11)
            ax.set_yscale("log")
        for ax in axes[1]:
            ax.set_ylim(best - 6, best + 0.5)
        for ax in axes[2]:
            ax.set_ylim(0.85, 1)
            ax.set_xlabel("upper iterations")
        fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return fig
