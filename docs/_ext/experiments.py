"""Recorded runs of the examples, as Markdown."""

from __future__ import annotations

import difflib
import importlib
import inspect
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from records import ROOT, read, table


def script(name: str) -> Any:
    """Import a script, or a module of the tests."""
    for folder in ("examples", "examples/paper", "tests"):
        if str(ROOT / folder) not in sys.path:
            sys.path.append(str(ROOT / folder))
    return importlib.import_module(name)


def _lasso(found: Any) -> str:
    problems = dict.fromkeys(run["problem"] for run in found["runs"])
    return "\n\n".join(f"**{problem}**\n\n{script('lasso').table(found['runs'], problem)}" for problem in problems)


def _learned(found: Any) -> str:
    head = ["start (x, y)", *(f"{name}: x, F" for name in found["runs"])]
    rows = []
    for i, (x, y) in enumerate(found["starts"]):
        cells = [f"{run['x'][i]:.3f}, {run['F'][i]:.3f}" for run in found["runs"].values()]
        rows.append([f"({x:g}, {y:g})", *cells])
    return table(head, rows)


def _maml_sine(found: Any) -> str:
    rows = []
    for method in dict.fromkeys(run["method"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["method"] == method]
        columns = zip(*(run["losses"] for run in runs), strict=True)
        rows.append([method, *(f"{statistics.mean(c):.2f} ± {statistics.stdev(c):.2f}" for c in columns)])
    return table(["steps", *map(str, found["steps"])], rows)


def _few_shot(found: Any) -> str:
    settings, report = found["settings"], script("_few_shot_report")
    seeds = len(next(iter(found["methods"].values()))["seeds"])
    budget = f"{settings['iterations']} upper iterations of {settings['tasks']} tasks"
    title = f"**{report.title(settings)}**, {budget}, {seeds} {'seed' if seeds == 1 else 'seeds'}:"
    return f"{title}\n\n{report.table(found)}"


def _few_shot_choice(found: Any) -> str:
    settings = found["settings"]
    title = f"**{script('_few_shot_report').title(settings)}**, {settings['episodes']} validation episodes:"
    return f"{title}\n\n{script('few_shot_choice').table(found)}"


def _cleaning(found: Any) -> str:
    name = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}[found["settings"]["dataset"]]
    return f"**{name}**:\n\n{script('hyper_cleaning').tables(found)}"


RENDERERS: dict[str, Callable[[Any], str]] = {
    "choice_few_shot": _few_shot_choice,
    "choice_hyper_cleaning": lambda found: script("hyper_cleaning_choice").table(found),
    "control_few_shot": _few_shot,
    "diagnosis": lambda found: script("diagnosis").table(found["problems"]),
    "distillation": lambda found: script("distillation").table(found),
    "few_shot": _few_shot,
    "hyper_cleaning": _cleaning,
    "hyperopt": lambda found: script("_hyperopt_report").table(found),
    "language_model": lambda found: script("_language_report").table(found),
    "lasso": _lasso,
    "learned_initialisation": _learned,
    "maml_sine": _maml_sine,
    "registration": lambda found: script("_registration_report").tables(found),
}
"""How the results of a script are shown; the names of its files begin with the key."""


def experiment(path: Path) -> str:
    """Return one recorded run of an example."""
    name = path.stem.removeprefix("earlier_")
    return next(render for key, render in RENDERERS.items() if name.startswith(key))(read(path))


def hyperopt_difference() -> str:
    """Return the difference between the plain training loop and the tuned one."""
    plain, tuned = (inspect.getsource(script(name).train).splitlines() for name in ("hyperopt_plain", "hyperopt"))
    lines = list(difflib.unified_diff(plain, tuned, lineterm="", n=2))[3:]
    return "\n".join(["```diff", *lines, "```"])
