"""Running the examples as scripts: once, or killed on the way and resumed."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


SCRIPTS = {path.stem: path for path in sorted((ROOT / "examples").rglob("[!_]*.py"))}


def run(script: str, *options: object) -> None:
    """Run a script in this process: importing torch and scikit-learn takes longer than a smoke run."""
    before, sys.argv = sys.argv, [script, *map(str, options)]
    try:
        runpy.run_path(str(SCRIPTS[script]), run_name="__main__")
    finally:
        sys.argv = before


def results(script: str, out: Path, *options: object) -> Any:
    """Run a script and return its JSON file."""
    run(script, "--out", out, *options)
    return json.loads((out / f"{script}.json").read_text("utf-8"))


KILLED = """
import os, runpy, signal, sys

script, checkpoint, *options = sys.argv[1:]
replace = os.replace

def replace_and_die(source, target, **names):
    replace(source, target, **names)
    if os.fspath(target).endswith(checkpoint):
        os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace_and_die
sys.argv = [script, *options]
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


def kill_at(script: str, out: Path, checkpoint: str, *options: object) -> None:
    """Start a script that is killed by SIGKILL as soon as the named checkpoint is there.

    The process kills itself: one that polls for the file may come too late on a loaded machine.
    """
    command = [sys.executable, "-c", KILLED, str(SCRIPTS[script]), checkpoint, "--out", str(out), *map(str, options)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(out.rglob(checkpoint))


def without_times(content: Any) -> Any:
    """Drop what may differ between two runs with the same settings."""
    if isinstance(content, dict):
        return {key: without_times(value) for key, value in content.items() if key not in ("seconds", "date")}
    return [without_times(value) for value in content] if isinstance(content, list) else content
