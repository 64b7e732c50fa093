"""The shape of the repository: layers, lengths, imports, and no paths of anybody's machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bda_optim"
MODULES = sorted(PACKAGE.rglob("*.py"))

ROOMS = ("_support", "_context", "_modules", "_step", "_adjoints", "_compiled", "_rollout", "_diagnosis")
"""The folders of the core, in order: a room imports from itself and from rooms before it."""

MAX_LINES = 350
LONGER = {  # path in the package -> the reason
    "_optimizer.py": "one class: the interface of torch.optim, and the doors unroll, commit and diagnose",
    "_support/torch_private.py": "every private part of torch is in one file",
}


def room(name: str) -> int:
    """The number of a room, by the first part of a path in the package; doors come after all rooms."""
    return ROOMS.index(name) if name in ROOMS else len(ROOMS)


def label(path: Path) -> str:
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


def test_every_folder_is_a_room_or_a_door() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= {*ROOMS, "compat", "distributed"}


def test_rooms_import_from_earlier_rooms_only() -> None:
    wrong = []
    for path in MODULES:
        here = room(label(path))
        for name, _ in imports(path):
            top, first = [*name.split("."), ""][:2]
            if top == PACKAGE.name and room(first) > here:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_optional_and_test_code_stays_outside() -> None:
    wrong = []
    for path in MODULES:
        for name, late in imports(path):
            top = name.split(".")[0]
            if top == "tests" or (top in {"higher", "torchopt"} and not late and label(path) != "compat"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


PRIVATE_PARTS = "_support/torch_private.py"
PRIVATE_ATTRIBUTES = {  # of tensors, nodes, modules and operators; they count as strings, too: `getattr(node, "...")`
    *("_version", "_sequence_nr", "_forward_cls", "_schema", "_orig_mod", "_compiled_call_impl"),
    *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"),
}


def private_names(path: Path) -> Iterator[str]:
    """Private names of torch in a file: imports, attributes of `torch`, attributes of its objects, names of nodes."""
    is_private = re.compile(r"torch(\.\w+)*\._(?!_)|torch\.fx\.experimental")
    yield from (name for name, _ in imports(path) if is_private.match(name))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            text = node.attr
            if is_private.match(whole := ast.unparse(node)):
                yield whole
        if text in PRIVATE_ATTRIBUTES or re.fullmatch(r"\w+Backward\d*|torch::autograd::\w+", text):
            yield text


def test_private_parts_of_torch_are_in_one_file() -> None:
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path in MODULES for name in private_names(path)]
    elsewhere = [line for line in wrong if not line.startswith(f"bda_optim/{PRIVATE_PARTS}")]
    assert len(wrong) > len(elsewhere) and not elsewhere, "\n".join(elsewhere)


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
