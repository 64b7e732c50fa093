"""Where results are recorded, and how a table is laid out in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks" / "results"
EXPERIMENTS = ROOT / "examples" / "results"
CAMPAIGN = ROOT / "tests" / "campaign" / "results"
README = ROOT / "README.md"
ABSENT = "*No run has been recorded yet.*"


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """Lay out a Markdown table: the first columns are text, the others are aligned as numbers."""
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value < 100 else f"{value:.0f}"
