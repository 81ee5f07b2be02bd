"""A strategy is one short file: the documentation's example, and an asynchronous one.

What becomes of them when trainings are cut short, and of their rounds in any order, is tested with
the strategies of sparkdl, which know nothing of them.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import own_asynchronous
import own_outer_momentum
from every_row import every


@every("module", [own_outer_momentum, own_asynchronous])
def test_it_is_a_short_file_that_needs_strategies_and_protocols_alone(module: ModuleType) -> None:
    text = _text(module)
    assert len(text.splitlines()) < 100
    nodes = list(ast.walk(ast.parse(text)))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    ours = {name for name in names if name and name.startswith("sparkdl")}
    assert ours == {"sparkdl.strategies", "sparkdl.protocols"}


def _text(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text()


def test_the_example_of_the_documentation_is_the_one_that_is_tested_here() -> None:
    page = (Path(__file__).parents[2] / "docs" / "writing-a-strategy.md").read_text()
    section = page.split("## An example: an outer optimizer with momentum\n")[1].split("\n## ")[0]
    example = section.split("```python\n")[1].split("```")[0]
    assert _text(own_outer_momentum).endswith(example)
