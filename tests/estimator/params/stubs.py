"""Run as a program, writes the types of the Params."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import sparkdl
from sparkdl.estimator.params.declaration import Default, described, field_of
from sparkdl.estimator.params.estimators import EstimatorParams

FOLDER = Path(sparkdl.__file__).parent / "estimator" / "params"
MODULES = ("columns", "training", "estimators")
KINDS = {"flag": "bool", "number": "int", "choice": "str"}
"""Functions that declare a Param, and the type of what each takes."""
HEADER = (
    '"""The types of the module of the same name, written by tests/estimator/params/stubs.py."""'
)


def written(module: str) -> str:
    """The stub of a module."""
    trees = {each: ast.parse((FOLDER / f"{each}.py").read_text()) for each in MODULES}
    declared = {name: call for tree in trees.values() for name, call in _declared(tree)}
    classes = [
        line
        for node in trees[module].body
        if isinstance(node, ast.ClassDef)
        for line in _class_lines(module, node, declared)
    ]
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
    always += "from typing_extensions import Self\n"
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


def _declared(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for each in ast.walk(tree):
        value = each.value if isinstance(each, ast.Assign) else None
        if isinstance(value, ast.Call) and ast.unparse(value.func) in ("Declaration", *KINDS):
            yield ast.unparse(each.targets[0]), value


def _types(call: ast.Call) -> tuple[str, str]:
    """What is taken, and what is held."""
    made = KINDS.get(ast.unparse(call.func), ast.unparse(call.args[0]))
    optional = made == "int" and ast.unparse(call.args[1]) == "None"
    taken = re.sub(r"\bStrategy\b", "Strategy[Any]", made) + (" | None" if optional else "")
    held = [ast.unparse(each.value) for each in call.keywords if each.arg == "held"]
    return taken, held[0] if held else taken


def _class_lines(module: str, node: ast.ClassDef, declared: dict[str, ast.Call]) -> Iterator[str]:
    yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):"
    own = [name for name, _ in _declared(ast.Module([node], []))]
    for name in own:
        taken, held = _types(declared[name])
        capital = name[0].upper() + name[1:]
        yield f"    {name}: Param[{held}]"
        yield f"    def get{capital}(self) -> {held}: ..."
        yield f"    def set{capital}(self, value: {taken}) -> Self: ..."
    if node.name.startswith("Torch"):
        yield from _constructor_lines(module, node.name, declared)
    elif node.name == "ParamValues":
        yield from _value_lines(declared)
    elif not own:
        yield "    ..."


def _value_lines(declared: dict[str, ast.Call]) -> Iterator[str]:
    yield "    def __init__(self, params: DeclaredParams) -> None: ..."
    for name, declaration in EstimatorParams.declarations.items():
        taken, held = _types(declared[name])
        unset = declaration.default is Default.UNSET and name != "strategy"
        one = taken if held == "Any" else held
        yield f"    {field_of(name)}: {one}{' | None' if unset else ''}"


def _constructor_lines(module: str, name: str, declared: dict[str, ast.Call]) -> Iterator[str]:
    params = getattr(
        importlib.import_module(f"sparkdl.estimator.params.{module}"), name
    ).declarations
    yield "    def __init__(self, *,"
    for each, declaration in params.items():
        argument = declaration.argument(each)
        taken = _types(declared[each])[0] + (
            " | None" if str(declaration.default).endswith("UNSET") else ""
        )
        default = argument.default
        plain = default is None or isinstance(default, (bool, int, float, str))
        shown = (
            "" if default is inspect.Parameter.empty else f" = {default!r}" if plain else " = ..."
        )
        yield f"        {each}: {taken}{shown},"
    yield "    ) -> None:"
    yield '        """Set what is given.'
    yield ""
    yield textwrap.indent(described(params, width=92), " " * 8)
    yield '        """'


def _only_used(line: str, body: str, own: set[str]) -> str:
    module, _, names = line.partition(" import ")
    kept = [each for each in names.split(", ") if re.search(rf"\b{each}\b", body)]
    kept = [each for each in kept if each not in own]
    return f"{module} import {', '.join(kept)}" if kept else ""


if __name__ == "__main__":
    for each in MODULES:
        (FOLDER / f"{each}.pyi").write_text(written(each))
