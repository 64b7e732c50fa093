"""The parts of the campaign, and the records of their full runs.

A part is a module with

- ``arguments(parser)``: add the options of the full run to an `argparse` parser;
- ``run(args) -> dict``: the full run. The dict has at least ``count`` (what was tried) and ``failures`` (a list of
  strings, each with the command that reproduces it; empty if all is well), and ``seed`` where there is one. Everything
  in it goes into a JSON file, which has the name of the part, or that of ``record`` where the dict has one;
- ``smoke() -> dict``: the same, bounded to about ten seconds: `tests/test_campaign.py` runs it;
- ``row(result) -> str``: what the table says of a result, in one line.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import re
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import bda_optim

PARTS: tuple[str, ...] = (
    "fuzz",
    "compiled",
    "mutants",
    "layers",
    "awkward",
    "faults",
    "interrupts",
    "kills",
    "threads",
    "memory",
)
"""The names of the parts; each is a module of this package."""

RESULTS = Path(__file__).parent / "results"

Result = dict[str, Any]


def load(name: str) -> ModuleType:
    """Import a part."""
    return importlib.import_module(f".{name}", __package__)


def measured(run: Callable[[], Result]) -> Result:
    """Run something, and add to its result how long it took and with what."""
    start = time.perf_counter()
    result = run()
    result.setdefault("seconds", round(time.perf_counter() - start, 1))
    result["versions"] = {
        "bda_optim": _version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
    result["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return result


def _version() -> str:
    """The package's version, also in a checkout that is not installed."""
    project = (Path(__file__).resolve().parent.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.+?)"', project, flags=re.MULTILINE)
    return found[1] if found else bda_optim.__version__


def full(name: str, args: Namespace) -> Result:
    """Run a part in full."""
    return measured(lambda: load(name).run(args))


def smoke(name: str) -> Result:
    """Run the bounded form of a part."""
    return measured(load(name).smoke)


def write(name: str, result: Result) -> Path:
    """Record the result of a full run; a run that is interrupted leaves the old record whole."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    draft = path.with_suffix(".json.new")
    draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)
    return path


def read(name: str) -> Result | None:
    """Return the recorded result of a part, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table(results: dict[str, Result | None]) -> str:
    """Summarise the results, one line per part."""
    lines = []
    for name, result in results.items():
        if result is None:
            lines.append(f"{name:10} not recorded")
            continue
        failures = len(result["failures"])
        state = "no failure" if not failures else f"{failures} FAILED"
        lines.append(f"{name:10} {state:12} {result['seconds']:8.1f} s   {load(name).row(result)}")
    return "\n".join(lines)
