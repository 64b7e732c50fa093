"""Run the numerical core tests on a device, against the CPU's numbers.

``python -m tests.device cuda`` (or ``mps``, ``xpu``, ``cpu``); further arguments go to pytest, such as ``-k dropout``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
ABSENT = "there is no device {name!r} here; nothing was run."
_WITHOUT_FLOAT64 = ("mps",)


def is_there(name: str) -> bool:
    """Whether a tensor can be made on a device, and read from it."""
    try:
        return torch.ones(1, device=name).tolist() == [1.0]
    except (RuntimeError, AssertionError, NotImplementedError):  # of torch builds without such a device
        return False


def run_cases(name: str, *options: str, show: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the tests on a device, in a process of its own."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
    dtype = "float32" if name.partition(":")[0] in _WITHOUT_FLOAT64 else "float64"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**inherited, "BDA_DEVICE": name, "BDA_DTYPE": dtype, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/device_cases.py"]
    return subprocess.run([*command, *options], cwd=ROOT, env=env, capture_output=not show, text=True, check=False)


def main(argv: Sequence[str]) -> int:
    """Return 0 if all tests pass, 1 if some fail, and 2 if there is no such device."""
    name, *options = argv or ["cpu"]
    if not is_there(name):
        print(ABSENT.format(name=name), file=sys.stderr)
        return 2
    return run_cases(name, *options, show=True).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
