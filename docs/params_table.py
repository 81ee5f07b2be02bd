"""The directive ``params-table``: a class's pyspark.ml Params, with what each says of itself."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from pyspark.ml.param import Param
from sphinx.util.docutils import SphinxDirective


class ParamsTable(SphinxDirective):
    """``.. params-table:: module.Class``; defaults are those of the constructor's arguments.

    Those of a constructor are in its order, under the groups that are the files in which
    ``sparkdl.estimator.params`` has them. With a second class behind it only what differs from that
    one's.
    """

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Give the table, in the order in which the constructor has the Params, then by name."""
        known, *others = [_rows(each) for each in self.arguments]
        rows = [row for row in known if not any(row in other for other in others)]
        lines = [".. list-table::", "   :header-rows: 1", ""]
        if not others:
            rows = _with_groups(rows, self.arguments[0])
        for row in [("Param", "default", "what it says of itself"), *rows]:
            lines += [f"   {'* -' if cell is row[0] else '  -'} {cell}" for cell in row]
        holder = nodes.container()
        self.state.nested_parse(StringList(lines, source=self.arguments[0]), 0, holder)
        return holder.children


def _owner(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def _with_groups(rows: list[tuple[str, str, str]], path: str) -> list[tuple[str, str, str]]:
    """The same with a row above each group of the constructor's arguments."""
    owner, group, found = _owner(path), "", []
    arguments = inspect.signature(owner.__init__).parameters
    for row in rows:
        name = row[0].strip("`")
        homes = [
            kind.__module__
            for kind in owner.__mro__
            if hasattr(kind, name) and kind.__module__.startswith("sparkdl.estimator.params.")
        ]
        if name in arguments and group != homes[-1]:
            group = homes[-1]
            found.append((f"**{group.rpartition('.')[2].capitalize()}**", "", ""))
        found.append(row)
    return found


def _rows(path: str) -> list[tuple[str, str, str]]:
    """Name, default and text of each Param of a class, as reStructuredText."""
    owner = _owner(path)
    arguments = inspect.signature(owner.__init__).parameters
    found: dict[str, Param[Any]] = {
        each: value for each, value in inspect.getmembers(owner) if isinstance(value, Param)
    }
    rows = []
    for each in sorted(found, key=lambda each: ([*arguments, each].index(each), each)):
        default = arguments[each].default if each in arguments else inspect.Parameter.empty
        shown = "" if default is inspect.Parameter.empty else f"``{default!r}``"
        rows.append((f"``{each}``", shown, found[each].doc.replace("*", r"\*")))
    return rows


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_directive("params-table", ParamsTable)
