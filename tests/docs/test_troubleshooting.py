"""Every message that the page about troubleshooting quotes is one that the code has."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADINGS = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


@cache
def templates() -> tuple[str, ...]:
    """Every text in the package, with … where a value is put in."""
    found = []
    for path in (ROOT / "sparkdl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = node.values
                found.append("".join(p.value if is_text(p) else "…" for p in parts))
            elif is_text(node):
                found.append(node.value)
    return tuple(found)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def has(message: str) -> bool:
    """Whether the pieces between … stand in one text in this order, and are not trifles."""
    pieces = [piece for piece in message.split("…") if len(piece) > 1]
    assert sum(map(len, pieces)) > 12, f"{message!r} would be found anywhere"
    wanted = re.compile(".*?".join(map(re.escape, pieces)), re.DOTALL)
    return any(wanted.search(template) for template in templates())


def test_the_code_has_the_messages() -> None:
    assert len(HEADINGS) > 25
    unsaid = [message for message in HEADINGS if not has(message)]
    assert not unsaid, "\n".join(unsaid)


def test_a_message_that_nobody_says_would_be_noticed() -> None:
    assert not has("the workers … are tired and went home")
    assert not has("slots … but the cluster has …, and all workers must run at the same time")
