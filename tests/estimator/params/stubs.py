"""Run as a program, writes the types of the Params."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import sparkdl
from sparkdl.estimator.params.declaration import (
    GROUPS,
    Declaration,
    DeclaredParams,
    Default,
    documented,
)
from sparkdl.estimator.schema import FitSettings

FOLDER = Path(sparkdl.__file__).parent / "estimator" / "params"
MODULES = ("columns", "training", "estimators")
KINDS = {"flag": "bool", "number": "int", "choice": "str"}
"""Functions that declare a Param, and the type of what each takes."""
SHARED = "_Arguments"
_SHARED = {
    name: each
    for name, each in FitSettings.declarations.items()
    if each.default is not Default.REQUIRED
}
HEADER = (
    '"""The types of the module of the same name, written by tests/estimator/params/stubs.py."""'
)


def written(module: str) -> str:
    """The stub of a module."""
    trees = {each: ast.parse((FOLDER / f"{each}.py").read_text()) for each in MODULES}
    declared = dict(each for tree in trees.values() for each in _declared(tree))
    classes = [
        line
        for node in trees[module].body
        if isinstance(node, ast.ClassDef)
        for line in _class_lines(module, node, declared)
    ]
    if module == "estimators":
        classes += _shared_lines(declared)
    body = "\n".join(classes)
    imports = [
        ast.unparse(node)
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        and node.module not in ("__future__", "sparkdl.estimator.params.declaration")
        and node.names[0].name not in ("converters", "replace")
    ]
    own = {node.name for node in trees[module].body if isinstance(node, ast.ClassDef)}
    used = [_only_used(line, body, own) for line in imports]
    always = "from typing import Any\nfrom pyspark.ml.param import Param\n"
    always += "from typing_extensions import Self, TypedDict, Unpack\n"
    always += "from sparkdl.estimator.params.declaration import DeclaredParams"
    text = "\n".join([HEADER, always, *used, body])
    for command in (["check", "--select", "I,F401", "--fix"], ["format"]):
        text = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                *command,
                "-q",
                "--stdin-filename",
                f"{module}.pyi",
                "-",
            ],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=FOLDER.parents[2],
        ).stdout
    return text


def _declared(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """What is taken, and what is held, by name."""
    for each in ast.walk(tree):
        call = each.value if isinstance(each, (ast.Assign, ast.AnnAssign)) else None
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("Declaration", *KINDS):
            continue
        taken = KINDS.get(ast.unparse(call.func), "")
        if taken == "int" and ast.unparse(call.args[1]) == "None":
            taken += " | None"
        taken = next((ast.unparse(k.value) for k in call.keywords if k.arg == "type"), taken)
        held = taken
        if isinstance(each, ast.AnnAssign):
            assert isinstance(each.annotation, ast.Subscript)
            held = ast.unparse(each.annotation.slice)
        name = each.target if isinstance(each, ast.AnnAssign) else each.targets[0]
        types = [re.sub(r"\bStrategy\b", "Strategy[Any]", kind) for kind in (taken or held, held)]
        yield ast.unparse(name), (types[0], types[1])


def _class_lines(
    module: str, node: ast.ClassDef, declared: dict[str, tuple[str, str]]
) -> Iterator[str]:
    cls = getattr(importlib.import_module(f"sparkdl.estimator.params.{module}"), node.name)
    yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):"
    lines = []
    for name, _ in _declared(ast.Module([node], [])):
        taken, held = declared[name]
        capital = name[0].upper() + name[1:]
        accessors = {
            name: f"    {name}: Param[{held}]",
            f"get{capital}": f"    def get{capital}(self) -> {held}: ...",
            f"set{capital}": f"    def set{capital}(self, value: {taken}) -> Self: ...",
        }
        # pyspark.ml types its own.
        known = [n for n in accessors if any(hasattr(base, n) for base in cls.__bases__)]
        lines += [line for n, line in accessors.items() if n not in known]
    if node.name.startswith("Torch"):
        lines += _constructor_lines(cls, declared)
    yield from lines or ["    ..."]


def _argument(name: str, declaration: Declaration, types: tuple[str, str]) -> str:
    unset = " | None" if declaration.default is Default.UNSET else ""
    return f"{name}: {types[0]}{unset}"


def _shared_lines(declared: dict[str, tuple[str, str]]) -> Iterator[str]:
    """The arguments that all estimators have and none needs, each once."""
    yield f"class {SHARED}(TypedDict, total=False):"
    for name, each in _SHARED.items():
        yield f"    {_argument(name, each, declared[name])}"


def _constructor_lines(
    params: type[DeclaredParams], declared: dict[str, tuple[str, str]]
) -> Iterator[str]:
    yield "    def __init__(self, *,"
    whole = {**FitSettings.declarations, **params.declarations}
    for name, each in whole.items():
        if name not in _SHARED:
            default = "" if each.default is Default.REQUIRED else " = ..."
            yield f"        {_argument(name, each, declared[name])}{default},"
    yield f"        **others: Unpack[{SHARED}],"
    yield "    ) -> None:"
    yield '        """Set what is given.'
    yield ""
    shown = whole if params.__name__ == "TorchEstimatorParams" else params.declarations
    shown = dict(sorted(shown.items(), key=lambda item: GROUPS.index(item[1].group)))
    yield textwrap.indent(documented(shown, width=92), " " * 8)
    yield '        """'


def _only_used(line: str, body: str, own: set[str]) -> str:
    module, _, names = line.partition(" import ")
    kept = [each for each in names.split(", ") if re.search(rf"\b{each}\b", body)]
    kept = [each for each in kept if each not in own]
    return f"{module} import {', '.join(kept)}" if kept else ""


if __name__ == "__main__":
    for each in MODULES:
        (FOLDER / f"{each}.pyi").write_text(written(each))
