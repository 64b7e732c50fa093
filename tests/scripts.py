"""Running the examples as scripts: once, or killed on the way and resumed."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run(script: str, *options: object) -> None:
    """Run a script to its end, in this process: to import torch and scikit-learn takes longer than a smoke run."""
    before, sys.argv = sys.argv, [script, *map(str, options)]
    try:
        runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    finally:
        sys.argv = before


def results(script: str, out: Path, *options: object) -> Any:
    """Run a script and return its JSON file."""
    run(script, "--out", out, *options)
    return json.loads((out / f"{script}.json").read_text("utf-8"))


def kill_at(script: str, out: Path, checkpoint: str, *options: object) -> None:
    """Start a script, and kill it as soon as the named checkpoint is there."""
    command = [sys.executable, str(ROOT / "examples" / f"{script}.py"), "--out", str(out), *map(str, options)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with process:
        while not (out / checkpoint).exists() and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()


def without_times(content: Any) -> Any:
    """Drop all that may differ between two runs with the same settings."""
    if isinstance(content, dict):
        return {key: without_times(value) for key, value in content.items() if key != "seconds"}
    return [without_times(value) for value in content] if isinstance(content, list) else content
