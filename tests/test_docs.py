"""The README and the pages: every snippet runs, numbers are those that were recorded, and every name is documented."""

from __future__ import annotations

import importlib.util
import re
import unittest
from pathlib import Path
from typing import Any

import experiments
import pytest
import records
import tables
import torch
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

import bda_optim as bda

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)


OPTIONAL = {"accelerate", "higher", "lightning", "peft", "tensorboard", "torchopt", "transformers", "wandb"}
"""What a snippet may need beside torch; where it is not installed, the snippet is skipped."""


def side(difference: str, mark: str) -> str:
    """Return one of the two programs of a difference."""
    lines = [line or " " for line in difference.splitlines()]
    return "\n".join(line[1:] for line in lines if line[0] in (" ", mark))


def run_both(example: Example) -> None:
    """Run the programs before and after a change: both leave the same gradients in `model`, unless `alpha` is new."""
    found = []
    for mark in "-+":
        names = dict(example.namespace) if mark == "-" else example.namespace
        try:
            exec(compile(side(example.parsed, mark), example.path, "exec"), names)
        except ModuleNotFoundError:
            assert mark == "-", "the old library need not be installed"
            continue
        found.append([p.grad for p in names["model"].parameters()])
        names["model"].zero_grad()
    if "alpha=" not in example.parsed:
        torch.testing.assert_close(found[0], found[-1], rtol=1e-9, atol=1e-12)


def snippets(path: Path) -> list[Example]:
    parsers = [PythonCodeBlockParser(), CodeBlockParser("diff", run_both), SkipParser()]
    document = Sybil(parsers=parsers).parse(path)
    document.namespace |= {"__name__": "snippet", "installed": lambda name: importlib.util.find_spec(name) is not None}
    return list(document.examples())


def runs_code(path: Path) -> bool:
    return "\n```python\n" in path.read_text("utf-8")


SLOW = {"transformers"}
RUN = [
    pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in SLOW else ())
    for path in [ROOT / "README.md", *filter(runs_code, PAGES)]
]


@pytest.mark.parametrize("path", RUN)
def test_snippets_run(path: Path, subtests: Any) -> None:
    """One after the other, in one namespace per page."""
    _run(path, subtests, fast=True)


@pytest.mark.slow
def test_the_snippet_that_compiles(subtests: Any) -> None:
    _run(DOCS / "guide" / "compiling.md", subtests, fast=False)


def _run(path: Path, subtests: Any, *, fast: bool) -> None:
    examples = snippets(path)
    assert examples
    absent = ""
    for example in examples:
        example.namespace["fast"] = fast
        with subtests.test(f"line {example.line}"):
            try:
                example.evaluate()
            except unittest.SkipTest as reason:
                pytest.skip(str(reason))
            except ModuleNotFoundError as missing:
                if (missing.name or "").split(".")[0] not in OPTIONAL:
                    raise
                absent = str(missing)
        if absent:
            pytest.skip(f"the rest of the page: {absent}")


def test_a_snippet_that_is_wrong_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nassert 1 == 2\n```\n")
    (example,) = snippets(page)
    with pytest.raises(AssertionError):
        example.evaluate()
    setup = "```python\nimport torch\nmodel = torch.nn.Linear(1, 1)\nx = torch.ones(1)\n```\n"
    page.write_text(setup + "```diff\n-model(x).sum().backward()\n+(2 * model(x)).sum().backward()\n```\n")
    first, change = snippets(page)
    first.evaluate()
    with pytest.raises(AssertionError):
        change.evaluate()


# --- the README -------------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_in_order() -> None:
    assert len(README.splitlines()) <= 180
    parts = (
        "bda_optim.compat.higher",
        "<!-- measured -->",
        "<!-- test-command -->",
        "```python",
        "`Unroll()`",
        ".png",
        "bibtex",
    )
    places = [README.index(part) for part in parts]
    assert places == sorted(places)


def test_the_readme_has_the_recorded_numbers() -> None:
    assert tables.MARKED.search(README)
    assert tables.readme() == README, "run `python docs/_ext/tables.py`"


def test_links_of_texts_lead_to_files() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *PAGES]:
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
            if not target.startswith(("http", "mailto")) and "generated/" not in target and "gallery/" not in target:
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"


def test_one_version_everywhere() -> None:
    version = re.search(r'^version = "(.+?)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE)


# --- the pages --------------------------------------------------------------------------------------------------------


def test_every_public_name_is_on_an_api_page() -> None:
    text = "".join(path.read_text("utf-8") for path in (DOCS / "api").glob("*.md"))
    documented = set(re.findall(r"auto(?:class|function|module):: ([\w.]+)", text))
    assert {name for name in bda.__all__ if name != "prox"} <= documented
    assert "bda_optim.prox" in documented


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_of_benchmarks(name: str) -> None:
    text = tables.markdown(name)
    if text == records.ABSENT:
        pytest.skip("not recorded yet")
    assert text.count("\n") > 2 and "nan" not in text and "None" not in text


@pytest.mark.parametrize("path", sorted(records.EXPERIMENTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_recorded_run_is_shown(path: Path) -> None:
    assert experiments.experiment(path).count("|") > 8
    page = (DOCS / "experiments.md").read_text("utf-8")
    asked = re.findall(r"^```\{recorded\} (.+)$", page, re.MULTILINE)
    assert any(path in tables.sources(name) for name in asked)


def test_what_has_not_run_is_said() -> None:
    assert tables.markdown("no_such_run*") == records.ABSENT
