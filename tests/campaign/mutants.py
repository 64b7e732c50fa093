"""Mutants: small faults put into a copy of the package on purpose; the tests must notice every one.

Each mutant is one edit (file, old text, new text) and the tests that ought to notice it: by default the bounded part of
the fuzzing, otherwise arguments of pytest. A mutant is run in a process of its own, forked after torch was imported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from . import registry
from .edits import EDITS

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "bda_optim"
PATIENCE = 300  # seconds
NO_TESTS = (4, 5)  # exit codes of pytest: a file that does not exist, and no test selected


class Outcome(NamedTuple):
    caught: bool
    by: str
    seconds: float


def occurrences() -> dict[str, int]:
    """How often the old text of each mutant occurs in its file; it must be once."""
    return {name: (PACKAGE / edit.file).read_text(encoding="utf-8").count(edit.old) for name, edit in EDITS.items()}


def attempt(name: str | None) -> Outcome:
    """Put a mutant (or, with None, no fault) into a copy of the repository and run its tests."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("bda_optim", "tests", "examples", "benchmarks"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.png", "results"))
        for file in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / file, copy)
        tests = ""
        if name is not None:
            edit = EDITS[name]
            path = copy / "bda_optim" / edit.file
            path.write_text(path.read_text(encoding="utf-8").replace(edit.old, edit.new), encoding="utf-8")
            tests = edit.tests
        code = _forked(copy, tests)
        with contextlib.suppress(OSError):
            tail = (copy / "output").read_text(encoding="utf-8").splitlines()[-1:]
    if code in NO_TESTS:
        raise RuntimeError(f"{name}: pytest found no test for `{tests}`")
    by = tests or "fuzz"
    return Outcome(code != 0, by + (f" ({tail[0][:80]})" if code and tail else ""), time.perf_counter() - start)


def _forked(copy: Path, tests: str) -> int:
    """Run tests of a copy in a child process; return its exit code."""
    assert not any(module.split(".")[0] == "bda_optim" for module in sys.modules), "fork before the package is imported"
    child = os.fork()
    if child == 0:
        output = os.open(copy / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        sys.path[:0] = [str(copy), str(copy / "tests")]
        code = 3
        try:
            code = _fuzz() if not tests else _pytest(tests.split())
        finally:
            sys.stdout.flush()
            os._exit(code)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 124  # a loop that does not end counts as caught


def _fuzz() -> int:
    """The bounded fuzzing, as far as the first failure."""
    from campaign import draw, fuzz

    for number in range(fuzz.BOUNDED):
        try:
            fuzz.check(draw.draw(fuzz.BOUNDED_SEED, number))
        except Exception as error:
            print(f"number {number}: {type(error).__name__}: {error}")
            return 1
    return 0


def _pytest(arguments: list[str]) -> int:
    import pytest

    options = ["-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    return int(pytest.main([*options, *(a.replace("+", " ") for a in arguments)]))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="the name of a single mutant")
    parser.add_argument("--some", help="only mutants whose name contains this")


def run(args: argparse.Namespace) -> registry.Result:
    """Run in a fresh interpreter, in which the package is not imported yet."""
    import json
    import subprocess

    names = [n for n in EDITS if args.only in (None, n) and (args.some or "") in n]
    found: dict[str, list[object]] = {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.campaign.mutants_worker", *names],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        name, *rest = json.loads(line)
        found[name] = rest
        print(f"{'caught' if rest[0] else 'SURVIVED':9} {name}: {rest[1]}, {rest[2]:.0f} s", flush=True)
    if process.wait() or set(found) != set(names):
        raise RuntimeError("the worker failed")
    survivors = [name for name, (caught, *_) in found.items() if not caught]
    return {
        "count": len(found),
        "caught": len(found) - len(survivors),
        "by": {name: by for name, (_, by, _) in found.items()},
        "failures": [f"python -m tests.campaign mutants --only '{name}'  # survived" for name in survivors],
    }


def smoke() -> registry.Result:
    """Only whether every mutant can still be made, and whether the files of its tests exist."""
    wrong = [f"{name}: its text occurs {n} times in {EDITS[name].file}" for name, n in occurrences().items() if n != 1]
    files = {name: edit.tests.split()[0] for name, edit in EDITS.items() if edit.tests}
    wrong += [f"{name}: there is no {file}" for name, file in files.items() if not (ROOT / file).exists()]
    return {"count": len(EDITS), "caught": "not tried", "failures": wrong}


def row(result: registry.Result) -> str:
    return f"{result['count']} mutants, caught: {result['caught']}"
