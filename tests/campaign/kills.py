"""Kills: a process that saves checkpoints is killed with SIGKILL again and again; its file is always whole."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))  # as under pytest: `import _run`

from test_run import KILLED  # noqa: E402


def campaign(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", KILLED, str(Path(folder) / "state.pt"), str(count)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"count": count, "writing": 0, "failures": [f"python -m tests.campaign kills: {done.stderr[-500:]}"]}
    moved, torn = map(int, done.stdout.split())
    failures = [] if moved and torn else [f"nothing was saved, or nothing hit: {moved} saves, {torn} hits"]
    return {"count": count, "saved": moved, "writing": torn, "failures": failures}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=100, help="how many kills")


def run(args: argparse.Namespace) -> dict[str, Any]:
    return campaign(args.count)


def smoke() -> dict[str, Any]:
    return campaign(10)


def row(result: dict[str, Any]) -> str:
    return (
        f"{result['count']} kills with SIGKILL, {result['writing']} of them during a write: the file was always whole"
    )
