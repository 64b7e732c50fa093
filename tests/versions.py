"""Run the core tests on several versions of torch and Python: ``python -m tests.versions --help``.

Each version gets a virtual environment of its own with a wheel of this checkout, one after the other, and the
environment is removed before the next one: a CUDA build of torch takes 5 to 7 GB. The tests run in a folder that does
not hold the package, so that the wheel is what they import. Results are recorded by versions in
tests/campaign/results/versions.json.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "campaign" / "results" / "versions.json"

VERSIONS = ("2.5.0", "2.9.1", "2.13.0", "2.15.0")
"""The oldest version that the package declares, one in the middle, the one that `.ci/run` tests, and the newest."""

CORE = (
    "accumulate", "adjoint", "capabilities", "compat_higher", "compat_torchopt", "engine", "functional", "hyper",
    "implicit", "innerloop", "modules", "optimizer", "prox", "rollout", "rule_choice", "rules", "second_derivatives",
    "torch_private", "tree_tasks",
)  # fmt: skip
"""The files of tests/ that are run: adjoints, rules, proximal maps, layers, compatible faces and the compiler."""

TOOLS = ("numpy", "pytest>=8", "pytest-xdist>=3.6")

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--show", action="store_true", help="print what is recorded, and test nothing")
    parser.add_argument(
        "--only",
        metavar="V",
        action="append",
        help=f"this torch instead of {', '.join(VERSIONS)}; repeatable",
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments")
    parser.add_argument("--script", type=Path, help="also run this script, which prints 'N passed, M failed' last")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep environments here, and use those that are here"
    )
    parser.add_argument("--processes", type=int, default=1, help="of pytest")
    parser.add_argument("--files", nargs="+", default=list(CORE), help="other files than the core tests; not recorded")
    parser.add_argument("--again", action="store_true", help="run only the tests that are recorded as failed")
    parser.add_argument("--only-script", action="store_true", help="run the script alone, and keep the recorded tests")
    args = parser.parse_args(arguments)

    rows = read()
    for version in () if args.show else args.only or VERSIONS:
        row = tested(version, args)
        rows = {**read(), key(row): row}
        if args.files == list(CORE):
            RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        for test, message in row["failures"].items():
            print("FAILED", row["torch"], test, message)
    print(table(rows.values()))
    return 1 if any(row["failures"] or not passed(row) for row in rows.values()) else 0


def passed(row: Row) -> bool:
    """Whether the script, if there was one, found nothing wrong."""
    return re.fullmatch(r"\d+ passed, 0 failed", row.get("script", "0 passed, 0 failed")) is not None


def read() -> dict[str, Row]:
    """Return what is recorded, by versions."""
    rows: dict[str, Row] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    return rows


def tested(version: str, args: argparse.Namespace) -> Row:
    """Make an environment with a version of torch, run the tests in it, and remove it."""
    with tempfile.TemporaryDirectory(prefix=f"torch-{version}-") as name:
        scratch = Path(name)
        start = time.perf_counter()
        python = environment(args.keep or scratch, version, args.python)
        install(python, version, scratch)
        installed = time.perf_counter()
        folder = scratch / "checkout"
        folder.mkdir()
        shutil.copy(ROOT / "pyproject.toml", folder)
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        row = facts(python)
        before = read().get(key(row), {})
        if args.only_script:
            row = {**before, **row}
        elif args.again:
            again = run_tests(python, folder, args.processes, list(before["failures"]))
            row = {**before, **row, "passed": before["passed"] + again["passed"], "failures": again["failures"]}
            row["skipped"] = dict(collections.Counter(before["skipped"]) + collections.Counter(again["skipped"]))
        else:
            row |= run_tests(python, folder, args.processes, [f"tests/test_{name}.py" for name in args.files])
            row["seconds"] = {"install": round(installed - start), "test": round(time.perf_counter() - installed)}
        if args.script is not None:
            row["script"] = run_script(python, folder, args.script.resolve())
    return row


def key(row: Row) -> str:
    """Return the name of a row in the record."""
    return f"torch {row['torch']}, Python {row['python']}"


def facts(python: Path) -> Row:
    """Return the versions of an environment, and the date."""
    look = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"
    torch_version, python_version = json.loads(call(python, "-c", look))
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"torch": torch_version, "python": python_version, "date": date}


def environment(folder: Path, version: str, interpreter: str) -> Path:
    """Return the interpreter of an environment in a folder, which is made if it is not there."""
    number = call(interpreter, "-c", "import sys; print('{}.{}'.format(*sys.version_info))").strip()
    path = folder.resolve() / f"torch-{version}-python-{number}"
    if not path.exists():
        call(interpreter, "-m", "venv", path)
    return path / "bin" / "python"


def install(python: Path, version: str, scratch: Path) -> None:
    """Install torch, a wheel of this checkout with its peers, and the test tools."""
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    call(*pip, "install", "-q", "--no-cache-dir", f"torch=={version}", *TOOLS)
    source = scratch / "source"
    shutil.copytree(ROOT / "bda_optim", source / "bda_optim", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    call(*pip, "wheel", "-q", "--no-cache-dir", "--no-deps", "-w", scratch, source)
    (wheel,) = scratch.glob("bda_optim-*.whl")
    call(*pip, "install", "-q", "--no-deps", "--force-reinstall", wheel)  # an environment that is kept has another one
    call(*pip, "install", "-q", "--no-cache-dir", f"torch=={version}", f"{wheel}[higher,torchopt]")


def run_tests(python: Path, folder: Path, processes: int, tests: list[str]) -> Row:
    """Run tests in a folder and count what came out."""
    report = folder / "report.xml"
    options = ["-q", "-n", str(processes), "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run([python, "-m", "pytest", *options, *tests], cwd=folder, env=clean(), check=False)
    row = counted(report) if report.is_file() else {"passed": 0, "skipped": {}, "failures": {}}
    if done.returncode and not row["failures"]:
        row["failures"]["pytest"] = f"ended with {done.returncode}"
    return row


def counted(report: Path) -> Row:
    """Return from a JUnit report how many tests passed, how many were skipped for which reason, and what failed."""
    passed, skipped, failures = 0, collections.Counter[str](), {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        left_out = case.find("skipped")
        if bad:
            words = (bad[0].get("message") or "").splitlines() or [""]
            failures[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = words[0]
        elif left_out is not None:
            skipped[left_out.get("message", "")] += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": dict(skipped), "failures": failures}


def run_script(python: Path, folder: Path, script: Path) -> str:
    """Run a script in the environment; print what it says has failed, and return its last line."""
    done = subprocess.run([python, script], cwd=folder, env=clean(), check=False, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [f"ended with {done.returncode} and printed nothing"]
    print("\n".join(line for line in lines if line.startswith("FAILED")))
    return lines[-1]


def clean() -> dict[str, str]:
    """Return the environment of a test run: nothing of this checkout, one thread."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def call(*command: Any) -> str:
    """Run a command; return what it printed, or raise with what it said."""
    done = subprocess.run([str(part) for part in command], env=clean(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(map(str, command))}` ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def table(rows: Iterable[Row]) -> str:
    """Return the results as a table in Markdown, by versions, and the reasons of what was skipped."""
    ordered = sorted(rows, key=lambda row: (numbers(row["torch"]), numbers(row["python"])))
    lines = ["| torch | Python | passed | skipped | failed | script | date |", "|---|---|---|---|---|---|---|"]
    for row in ordered:
        counts = row["passed"], sum(row["skipped"].values()), len(row["failures"])
        cells = row["torch"], row["python"], *counts, row.get("script", "-"), row["date"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for row in ordered:
        for reason, count in row["skipped"].items():
            lines.append(f"torch {row['torch']}, Python {row['python']}: {count} skipped: {reason}")
    return "\n".join(lines)


def numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers, without what follows a plus sign."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


if __name__ == "__main__":
    sys.exit(main())
