"""The table and the figure of hyperopt.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLORS = {"hypergradient": "#D55E00", "TPE": "#0072B2", "random": "#777777"}
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}


def entry(values: list[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def table(results: Mapping[str, Any]) -> str:
    """Return the results in Markdown, as mean and standard deviation over the seeds."""
    lines = [
        "| method | validation loss | loss of fresh runs | test accuracy of fresh runs, % | evaluations |",
        "|---|---:|---:|---:|---:|",
    ]
    start = results["start"]
    lines.append(f"| start | - | {start['fresh_loss']:.3f} | {statistics.mean(start['test']):.2f} | - |")
    for method in dict.fromkeys(run["method"] for run in results["runs"]):
        runs = [run for run in results["runs"] if run["method"] == method]
        cells = (
            entry([run["best"] for run in runs], 3),
            entry([run["fresh_loss"] for run in runs], 3),
            entry([statistics.mean(run["test"]) for run in runs], 2),
            f"{statistics.mean(run['evaluations'] for run in runs):.0f}",
        )
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(results: Mapping[str, Any]) -> Figure:
    """Draw the best validation loss against CPU time, a line per seed."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(6.4, 3.8), layout="constrained")
        ax = fig.subplots()
        labelled = set()
        for run in results["runs"]:
            method = run["method"]
            times, losses = zip(*run["curve"], strict=True)
            label = None if method in labelled else method
            ax.step(times, losses, where="post", color=COLORS[method], label=label, linewidth=1.5)
            labelled.add(method)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.grid(color="#ececec", which="both")
        ax.set_xlabel("CPU time, s")
        ax.set_ylabel("best validation loss")
        ax.set_title("19 settings of a training loop, one line per seed", fontsize=10)
        ax.legend(frameon=False)
    return fig
