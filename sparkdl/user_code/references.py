"""What a pickle needs to find where it is loaded: the modules that it names, and those it imports.

A pickle holds the classes and functions of importable modules by name, and those of ``__main__`` by
value. So it needs the modules that are named in it, and also those that its functions by value
import when they are called.
"""

from __future__ import annotations

import dis
import importlib.util
import io
import types
from collections.abc import Iterator
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


def pickled(value: Any, names: set[str]) -> bytes:
    """Pickle an object.

    Args:
        value: the object.
        names: where the names are added that are looked for when the pickle is loaded and used.
    """
    file = io.BytesIO()
    ReferencePickler(file, names).dump(value)
    return file.getvalue()


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
