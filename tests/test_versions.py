"""`python -m tests.versions`: how a report is counted; and what is declared is what was tested."""

from __future__ import annotations

import re
from pathlib import Path

import versions

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="one"/>
<testcase classname="tests.test_a" name="two"><failure message="first line&#10;second">...</failure></testcase>
<testcase classname="tests.test_a" name="three"><skipped message="since torch 9">...</skipped></testcase>
<testcase classname="tests.test_a" name="four"><error message="at setup">...</error></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    row = versions.counted(report)
    assert row == {
        "passed": 1,
        "skipped": {"since torch 9": 1},
        "failures": {"tests/test_a.py::two": "first line", "tests/test_a.py::four": "at setup"},
    }
    facts = {"torch": "2.10.0+cpu", "python": "3.11.7", "date": "2026-01-01"}
    lines = versions.table([{**facts, **row}, {**facts, **row, "torch": "2.9.0"}]).splitlines()
    assert lines[2] == "| 2.9.0 | 3.11.7 | 1 | 1 | 2 | - | 2026-01-01 |", "2.9 comes before 2.10"
    assert "1 skipped: since torch 9" in lines[-1]


def test_the_core_tests_are_there() -> None:
    assert [name for name in versions.CORE if not (ROOT / "tests" / f"test_{name}.py").is_file()] == []


def test_what_is_declared_is_what_was_tested() -> None:
    rows = versions.read().values()
    assert rows and not [row for row in rows if row["failures"] or not versions.passed(row)]
    torch_versions = sorted(versions.numbers(row["torch"])[:2] for row in rows)
    (first, bound) = re.findall(r'^dependencies = \["torch>=([\d.]+),<([\d.]+)"\]', PROJECT, flags=re.MULTILINE)[0]
    assert versions.numbers(first) == torch_versions[0]
    assert versions.numbers(bound) == (torch_versions[-1][0], torch_versions[-1][1] + 1)
    declared = re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', PROJECT)
    assert {f"3.{versions.numbers(row['python'])[1]}" for row in rows} <= set(declared)
    assert re.search(rf'^requires-python = ">={declared[0]}"', PROJECT, flags=re.MULTILINE)
