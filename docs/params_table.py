"""The directive ``params-table``: the Params of an estimator or a model, by group."""

from __future__ import annotations

import importlib
from itertools import groupby
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from sparkdl.estimator.params.declaration import Declaration, Default


class ParamsTable(SphinxDirective):
    """``.. params-table:: module.Class``, in the order in which the constructor has them.

    With a second class behind it only what differs from that one's.
    """

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Give the table, with a row above each group."""
        known, *others = [_declarations(each) for each in self.arguments]
        rows = [("Param", "default", "meaning")]
        for group, members in groupby(known.items(), lambda item: item[1].group):
            found = [_row(n, each) for n, each in members if all(o.get(n) != each for o in others)]
            rows += [*([(f"**{group}**", "", "")] if found and not others else []), *found]
        lines = [".. list-table::", "   :header-rows: 1", ""]
        for row in rows:
            lines += [f"   {'* -' if cell is row[0] else '  -'} {cell}" for cell in row]
        holder = nodes.container()
        self.state.nested_parse(StringList(lines, source=self.arguments[0]), 0, holder)
        return holder.children


def _declarations(path: str) -> dict[str, Declaration]:
    module, name = path.rsplit(".", 1)
    found: dict[str, Declaration] = getattr(importlib.import_module(module), name).declarations
    return found


def _row(name: str, declaration: Declaration) -> tuple[str, str, str]:
    """Name, default and text, as reStructuredText."""
    default = declaration.default
    if isinstance(default, Default):
        shown = "" if default is Default.REQUIRED else "``None``"
    else:
        shown = f"``{default!r}``"
    return f"``{name}``", shown, declaration.text.replace("*", r"\*")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_directive("params-table", ParamsTable)
