"""The Sphinx side of recorded results: a directive for tables, a role for single numbers, and the figures.

``{recorded} NAME`` inserts the table of that name (`tables.TABLES`), or the tables of every file of examples/results
that matches NAME. ``{number}`` inserts one of `tables.NUMBERS`. `figures.FIGURES` are drawn into docs/generated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import figures
import tables
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole


class Recorded(SphinxDirective):
    """Insert tables of recorded results, as Markdown."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        text = tables.markdown(self.arguments[0])
        self.env.note_reread()  # records may have changed since the last build
        box = nodes.container()
        self.state.nested_parse(StringList(text.splitlines(), source=""), 0, box)
        return box.children


class Number(SphinxRole):
    """Insert one recorded number."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        self.env.note_reread()
        return [nodes.Text(tables.NUMBERS[self.text]())], []


def draw(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    for name, figure in figures.FIGURES.items():
        figure().savefig(folder / f"{name}.png", dpi=110)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("recorded", Recorded)
    app.add_role("number", Number())
    app.connect("builder-inited", draw)
    return {"version": "1", "parallel_read_safe": True}
