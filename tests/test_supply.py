"""What comes with the package, and what it may do: imports, code from elsewhere, a reproducible wheel, pins."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bda_optim"
OPTIONAL = {"higher", "torchopt", "matplotlib"}  # in `compat` and where a report is plotted, if they are asked for
TRUSTED = {*sys.stdlib_module_names, "torch", "bda_optim", *OPTIONAL}

RUNS_CODE = {"eval", "exec", "compile", "__import__"}
BRINGS_CODE = {"pickle", "marshal", "shelve", "urllib", "http", "ftplib", "socket", "subprocess", "ctypes", "requests"}


def imported(source: str) -> set[str]:
    """The first names of everything that a source imports absolutely, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return found


def offences(source: str) -> list[str]:
    """The places of a source that import, run, unpickle or download something unasked."""
    names = imported(source)
    found = [f"imports {name}" for name in sorted((names - TRUSTED) | (names & BRINGS_CODE))]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in RUNS_CODE:
            found.append(f"calls {node.func.id}")
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            called = f"{node.func.value.id}.{node.func.attr}"
            safe = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in node.keywords)
            if called == "torch.load" and not safe:
                found.append("calls torch.load without weights_only=True")
            if called in ("os.system", "os.popen") or called.startswith("torch.hub"):
                found.append(f"calls {called}")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_the_package_needs_torch_alone_and_runs_no_code_from_elsewhere(path: Path) -> None:
    assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import numpy",
        "def f():\n    from scipy import linalg",
        "import pickle",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import os\nos.system('ls')",
        "import urllib.request",
    ],
)
def test_offences_are_found(source: str) -> None:
    assert len(offences(source)) == 1


def test_the_import_brings_in_nothing_but_the_package() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import bda_optim; new = set(sys.modules) - before; "
        "print(*sorted({name.split('.')[0] for name in new})); "
        "print(*sorted(name for name in new if name.startswith('torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    first, of_torch = (set(line.split()) for line in done.stdout.split("\n")[:2])
    assert first - sys.stdlib_module_names - {"torch"} == {"bda_optim"}
    heavy = ("torch._inductor", "torch._dynamo", "torch.distributed", "torch.fx.experimental")
    assert not [name for name in of_torch if name.startswith(heavy)], "the compiler and the like are loaded when needed"


def wheel(where: Path) -> Path:
    """Build a wheel in a fresh copy of the sources; the build's own files stay there."""
    where.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, where / name)
    shutil.copytree(PACKAGE, where / "bda_optim", ignore=shutil.ignore_patterns("__pycache__"))
    for path in where.rglob("*"):
        os.utime(path, (time.time(), time.time() - 1000 * len(where.name)))  # sources of another time
    code = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return where / done.stdout.splitlines()[-1]


@pytest.mark.skipif(
    int(metadata.version("setuptools").split(".")[0]) < 77, reason="pyproject.toml needs setuptools 77 to build"
)
def test_two_wheels_of_the_same_sources_are_the_same_file(tmp_path: Path) -> None:
    first, second = wheel(tmp_path / "a"), wheel(tmp_path / "another")
    assert first.name == second.name
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()
    names = zipfile.ZipFile(first).namelist()
    assert "bda_optim/py.typed" in names and "bda_optim/compat/higher/__init__.py" in names
    assert not [name for name in names if not name.startswith(("bda_optim/", "bda_optim-"))]


def test_every_tested_version_is_pinned_and_the_package_asks_for_ranges() -> None:
    """The policy under "Security" in docs/guide/reliability.md."""
    pins = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1].isalpha()]
    assert pins and all(re.match(r"^[\w-]+==[\w.]+(;.*)?$", line) for line in pins)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^dependencies = \["torch>=[\d.]+,<[\d.]+"\]$', text, re.M), "torch, from below and above"
    asked = set(re.findall(r'^ +"([\w-]+)>=', text, re.M)) | set(re.findall(r'"([\w-]+)>=[\d.]+"', text)) - {
        "setuptools"
    }
    assert {name.lower() for name in asked} <= {line.split("==")[0].lower() for line in pins}, (
        "pin what the tests install"
    )
