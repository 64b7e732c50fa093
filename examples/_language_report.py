"""The tables and the figure of language_model_data_weights.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLORS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7")  # of the sources: cold ones are clean
CHOICES = {"uniform": "#777777", "learned": "#D55E00", "oracle": "#0072B2"}
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}


def table(results: Mapping[str, Any]) -> str:
    """Return the test losses and the last weights in Markdown, with a column per seed."""
    runs = results["runs"]
    seeds = [f"seed {run['seed']}" for run in runs]
    before = [run["test"]["uniform"][0] for run in runs]
    losses = [row("before fine-tuning", before, 3)]
    losses += [row(name, [run["test"][name][-1] for run in runs], 3) for name in CHOICES]
    weights = []
    for i, source in enumerate(results["sources"]):
        name = f"{source} (spoiled)" if source in results["spoiled"] else source
        weights.append(row(name, [run["weights"][-1][i] for run in runs], 3))
    heads = ("test loss, nats per character", "weight")
    tables = [[header([head, *seeds, "mean"]), *rows] for head, rows in zip(heads, (losses, weights), strict=True)]
    return "\n\n".join("\n".join(lines) for lines in tables)


def header(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n|---|" + "---:|" * (len(cells) - 1)


def row(name: str, values: Sequence[float], digits: int) -> str:
    return f"| {name} | " + " | ".join(f"{value:.{digits}f}" for value in (*values, statistics.mean(values))) + " |"


def figure(results: Mapping[str, Any]) -> Figure:
    """Draw the weights over the upper iterations, and the test loss along the fine-tuning; a line per seed."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(10, 3.9), layout="constrained")
        left, right = fig.subplots(1, 2)
        for i, source in enumerate(results["sources"]):
            spoiled = source in results["spoiled"]
            for k, run in enumerate(results["runs"]):
                label = (f"{source} (spoiled)" if spoiled else source) if k == 0 else None
                style = {"color": COLORS[i], "linestyle": "--" if spoiled else "-", "linewidth": 1.5}
                left.plot([weights[i] for weights in run["weights"]], label=label, **style)
        left.set_yscale("log")
        left.set(xlabel="upper iteration", ylabel="weight", title="weights of the sources")
        left.legend(frameon=False, fontsize=8, loc="lower left")
        every = results["settings"]["every"]
        for name, color in CHOICES.items():
            for k, run in enumerate(results["runs"]):
                losses = run["test"][name]
                steps = [every * j for j in range(len(losses))]
                right.plot(steps, losses, color=color, label=name if k == 0 else None, linewidth=1.5)
        right.set(xlabel="step of fine-tuning", ylabel="nats per character", title="test loss on the wanted text")
        right.legend(frameon=False)
        for axes in (left, right):
            axes.title.set_fontsize(10)
            axes.grid(color="#ececec")
    return fig
