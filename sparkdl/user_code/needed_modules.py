"""The modules that code needs: which ones it names or imports, and what to do if one is missing.

A pickle holds the classes and functions of importable modules by name, and those of ``__main__`` by
value. So it needs the modules that are named in it, and also those that its functions by value
import when they are called.
"""

from __future__ import annotations

import dis
import importlib.util
import io
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cloudpickle

_IMPORT = dis.opmap["IMPORT_NAME"]


class ReferencePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's, which also notes what its pickle will look for.

    Args:
        file: where it writes to.
        names: where it adds dotted names: of modules, or of what a module may have.
    """

    def __init__(self, file: io.BytesIO, names: set[str]) -> None:
        super().__init__(file)
        self._names = names

    def reducer_override(self, value: Any) -> Any:
        """Called by the pickler for everything but numbers, texts and plain containers."""
        reduced = super().reducer_override(value)
        if reduced is NotImplemented:
            if isinstance(value, types.ModuleType):
                self._names.add(value.__name__)
            elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
                self._names.add(value.__module__ or "builtins")
            else:
                self._names.add(type(value).__module__)  # which its own pickling may not name
        elif isinstance(value, types.FunctionType):
            package = value.__globals__.get("__package__")
            self._names.update(imported_names(value.__code__, package))
        return reduced


def imported_names(code: types.CodeType, package: str | None) -> Iterator[str]:
    """What a piece of code imports, also within functions.

    Args:
        code: of a module or function.
        package: to which relative imports refer; they say nothing without.

    Yields:
        The dotted names of modules, and of what is taken from them, which may be modules too.
    """
    for each in nested_code(code):
        if _IMPORT not in each.co_code[::2]:
            continue
        steps = [step for step in dis.get_instructions(each) if step.opname != "EXTENDED_ARG"]
        for level, taken, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opcode != _IMPORT:
                continue
            name = str(step.argval)
            if level.argval:
                if not package:
                    continue
                try:
                    name = importlib.util.resolve_name("." * level.argval + name, package)
                except ImportError:  # beyond the package: Python will refuse it as well
                    continue
            yield name
            yield from (f"{name}.{item}" for item in taken.argval or () if item != "*")


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """A piece of code, and that of all functions and classes in it."""
    found = [code]
    for each in found:
        found += [inner for inner in each.co_consts if isinstance(inner, types.CodeType)]
        yield each


HOW_OTHERS_TRAVEL = (
    "Where it is not installed on the executors, add it: pure-Python modules and packages with "
    "spark.sparkContext.addPyFile(path), --py-files or spark.submit.pyFiles (a file, or a "
    "package as a zip), packages with compiled parts as an environment that has them "
    "(spark.archives)"
)

_TRAVEL = (
    "Modules beside your script or notebook travel by themselves if the model, loss, optimizer "
    "or function is defined in them, or if what is sent imports them; this one did not. "
    f"{HOW_OTHERS_TRAVEL}"
)

_left_behind: dict[str, str] = {}


@contextmanager
def left_behind(reasons: Mapping[str, str]) -> Iterator[None]:
    """Know meanwhile why modules of the user's own did not come along.

    Args:
        reasons: by dotted name; each continues a sentence that begins with the name.
    """
    before = dict(_left_behind)
    _left_behind.update(reasons)
    try:
        yield
    finally:
        _left_behind.clear()
        _left_behind.update(before)


def advice(error: ModuleNotFoundError) -> str:
    """What to do about a module that was not found, for the end of a message."""
    parts = (error.name or "").split(".")
    for depth in range(len(parts), 0, -1):
        name = ".".join(parts[:depth])
        if name in _left_behind:
            return f"The module {name} {_left_behind[name]}. {HOW_OTHERS_TRAVEL}"
    return _TRAVEL
