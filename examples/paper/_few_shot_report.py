"""The tables and figures of few_shot.py, drawn from the results as they are in its JSON file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

# The accuracy of which the paper's Table 4 counts the upper iterations.
TARGETS = {"omniglot": 0.9, "cifar_fs": 0.44, "mini_imagenet": 0.44, "made": 0.5}

PAPER = {  # test accuracies in percent: its Tables 3 and 4
    ("omniglot", 5, 1): (98.70, 97.97, 97.68, 98.60, 98.74, 99.04),
    ("omniglot", 5, 5): (99.91, 98.96, 99.48, 99.50, 99.52, 99.62),
    ("omniglot", 20, 1): (95.80, 93.98, 89.43, 95.50, 95.82, 96.50),
    ("omniglot", 20, 5): (98.90, 98.40, 97.12, 98.40, 98.95, 99.10),
    ("mini_imagenet", 5, 1): (None, None, None, 48.89, 47.67, 49.08),
}


def title(settings: dict[str, Any]) -> str:
    names = {"omniglot": "Omniglot", "cifar_fs": "CIFAR-FS", "mini_imagenet": "mini-ImageNet", "made": "made images"}
    return f"{names[settings['dataset']]}, {settings['ways']}-way {settings['shots']}-shot"


def until(curve: Sequence[Sequence[float]], accuracy: float) -> float | None:
    """Return the upper iteration at which the validation accuracy is first reached."""
    return next((iteration for iteration, _, found in curve if found >= accuracy), None)


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def joint(intervals: Sequence[float]) -> float:
    """Return the interval of the mean over seeds, whose episodes are independent."""
    return math.sqrt(sum(i * i for i in intervals)) / len(intervals)


def over_seeds(leads: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean lead over the seeds, and its interval."""
    means, intervals = zip(*leads, strict=True)
    return sum(means) / len(means), joint(intervals)


def table(found: dict[str, Any]) -> str:
    """Return the results in Markdown; the paper has numbers of some data sets, and none of the controls."""
    settings = found["settings"]
    paper = PAPER.get((settings["dataset"], settings["ways"], settings["shots"]), ())
    published = {name: value for name, value in zip(COLORS, paper, strict=False) if value is not None}
    rows = []
    for name in [name for name in COLORS if name in found["methods"]]:
        mine = found["methods"][name]
        lead, until = mine.get("lead"), mean(mine["until"])
        row = {
            "method": mine["method"]["title"],
            "accuracy, %": f"{100 * mean(mine['accuracy']):.2f} ± {100 * joint(mine['interval']):.2f}",
            "lead over RHG": "{:+.2f} ± {:.2f}".format(*(100 * v for v in over_seeds(lead))) if lead else "",
            "paper, %": f"{published[name]:.2f}" if name in published else "",
            f"iterations until {found['target']:.0%}": "not reached" if until is None else f"{until:.0f}",
            "CPU s": f"{mean(mine['seconds']['cpu']):.0f}",
        }
        if not published:
            del row["paper, %"]
        rows.append(row)
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" + "|---:" * (len(rows[0]) - 1) + "|"]
    lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
    return "\n".join(lines)


COLORS = {  # told apart with any colour vision
    "maml": "#56B4E9",
    "meta-sgd": "#009E73",
    "reptile": "#CC79A7",
    "rhg": "#0072B2",
    "t-rhg": "#E69F00",
    "bda": "#D55E00",
    "bda-third": "#000000",
    "rhg-query": "#999999",
}
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
}


def figure(found: dict[str, Any]) -> Figure:
    """Validation loss and accuracy against the upper iteration (the paper's Figure 4), and the test accuracy."""
    settings = found["settings"]
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(14, 4.8), layout="constrained")
        left, middle, right = fig.subplots(1, 3)
        names = [name for name in COLORS if name in found["methods"]]
        titles = [found["methods"][name]["method"]["title"] for name in names]
        for place, name in enumerate(names):
            mine, color = found["methods"][name], COLORS[name]
            curve = torch.tensor(mine["curves"]).mean(0)
            style = {"color": color, "label": titles[place], "linewidth": 2.4 if name == "bda" else 1.5}
            style["linestyle"] = "dashed" if mine["method"]["whole"] else "solid"
            left.plot(curve[:, 0], curve[:, 1], **style)
            middle.plot(curve[:, 0], 100 * curve[:, 2], **style)
            accuracy, interval = 100 * mean(mine["accuracy"]), 100 * joint(mine["interval"])
            right.errorbar(accuracy, place, xerr=interval, color=color, fmt="o", capsize=4)
        middle.axhline(100 * found["target"], color="#999999", linewidth=1)
        right.set(yticks=range(len(names)), yticklabels=titles, ylim=(len(names), -1))
        right.locator_params(axis="x", nbins=5)
        left.set(xlabel="upper iteration", title="validation loss")
        middle.set(xlabel="upper iteration", title="validation accuracy, %")
        right.set(xlabel="%", title=f"test accuracy, {settings['test_episodes']} episodes, 95 % intervals")
        fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        fig.suptitle(title(settings))
    return fig


def curves(runs: Sequence[dict[str, Any]]) -> Figure:
    """Validation loss of every method against the upper iteration, on a logarithmic scale, one panel per run."""
    with matplotlib.rc_context({**STYLE, "font.size": 9}):
        rows = math.ceil(len(runs) / 3)
        fig = Figure(figsize=(10, 3.1 * rows), layout="constrained")
        panels = fig.subplots(rows, 3, squeeze=False).flatten()
        for panel, found in zip(panels, runs, strict=False):
            for name in [name for name in COLORS if name in found["methods"]]:
                mine = found["methods"][name]
                points = torch.tensor(mine["curves"]).mean(0)
                style = {"color": COLORS[name], "label": mine["method"]["title"]}
                style["linestyle"] = "dashed" if mine["method"]["whole"] else "solid"
                panel.plot(points[:, 0], points[:, 1], **style)
            panel.set(title=title(found["settings"]), xlabel="upper iteration", yscale="log")
            for set_formatter in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
                set_formatter(lambda value, _: f"{value:g}")
        for panel in panels[len(runs) :]:
            panel.set_axis_off()
        panels[0].set(ylabel="validation loss")
        labels: dict[str, Any] = {}
        for panel in panels:  # a method need not be in every panel
            labels.update(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
        fig.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False)
    return fig
