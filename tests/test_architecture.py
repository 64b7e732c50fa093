"""The shape of the repository: layers, lengths, imports, and no paths of anybody's machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bda_optim"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (
    {"_types", "_tree", "_graph", "_recompose", "_partition", "_products"},
    {
        "_schedules",
        "_program",
        "_trace",
        "_aggregation",
        "_prox",
        "_rules",
        "_functional",
        "_plan",
        "_settings",
        "_ambient",
        "_tangent",
        "_freeze",
        "_shelf",
        "_segments",
    },
    {"_objective", "_step", "_replay", "_adjoint", "_mixed", "_divergence", "_guard"},
    {"_rollout", "_engine", "_engines", "_units"},
    {"_module", "_optimizer", "_innerloop", "compat", "diagnose", "distributed", "__init__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PEERS = {2, 3, 4}  # the layers whose modules may import one another

MAX_LINES = 400
LONGER = {"_rules.py": "one class per rule, and there are over a dozen"}  # path in the package -> the reason


def label(path: Path) -> str:
    """The name that has a layer: a module of the package, or a subpackage as a whole."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The absolute name of everything imported (TYPE_CHECKING included), and whether inside a function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    late = {id(node) for function in functions for node in ast.walk(function)}
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = [*base, node.module] if node.module else [*base]
            yield from ((".".join([*module, alias.name]), id(node) in late) for alias in node.names)


def test_every_module_has_a_layer() -> None:
    unknown = sorted({label(path) for path in MODULES} - LEVEL.keys())
    assert not unknown, f"give {unknown} a layer in LAYERS of {Path(__file__).name}"


def test_imports_point_downwards() -> None:
    unknown = {label(path) for path in MODULES} - LEVEL.keys()  # the test above reports these
    wrong = []
    for path in MODULES:
        source, here = label(path), LEVEL.get(label(path), 0)
        for name, _ in imports(path):
            top, first = [*name.split("."), ""][:2]
            if top != PACKAGE.name or unknown & {source, first}:
                continue
            # What is no module of its own comes from the top of the package: `from bda_optim import Unroll`.
            target = first if first in LEVEL else "__init__"
            there = LEVEL[target]
            if not (there < here or (there == here and here in PEERS) or source == target):
                wrong.append(f"{path.relative_to(ROOT)} (L{here}) imports {name} (L{there})")
    assert not wrong, "\n".join(wrong)


def test_optional_and_test_code_stays_outside() -> None:
    wrong = []
    for path in MODULES:
        for name, late in imports(path):
            top = name.split(".")[0]
            if top == "tests" or (top in {"higher", "torchopt"} and not late and label(path) != "compat"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_modules_are_short() -> None:
    lengths = {p.relative_to(PACKAGE).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in MODULES}
    long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES and name not in LONGER}
    assert not long, f"over {MAX_LINES} lines: {long}; split them, or give the reason in LONGER"


def test_no_absolute_machine_paths() -> None:
    machine = re.compile(r"(?<![\w.-])/(?:work|tmp|home|root|Users)/\w")
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    files = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    texts = [path for path in files if path.suffix in {".py", ".md", ".toml", ".txt"} and path.is_file()]
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in [*texts, ROOT / ".ci" / "run"]}
    wrong = [f"{path.relative_to(ROOT)}: {line}" for path in lines for line in lines[path] if machine.search(line)]
    assert not wrong, "\n".join(wrong)
