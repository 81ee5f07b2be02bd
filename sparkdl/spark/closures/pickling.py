"""Pickles of the user's functions for executors, and the broadcast variables that they refer to.

PySpark notes a broadcast variable, for the thread, while it pickles the function that uses it, and
sends it along with the next function that it runs. Ours is pickled earlier, and often in another
thread. So the pickler here notes it in ``References`` instead, and the ``References`` are part of
the function that PySpark pickles.

What cannot be pickled is refused by the name of the part at fault.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import io
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sparkdl.errors import ModelError, SparkDLError
from sparkdl.spark.catalyst.broadcasts import number_of
from sparkdl.spark.catalyst.core import Broadcast, _from_id
from sparkdl.user_code.needed_modules import ReferencePickler, nested_code
from sparkdl.user_code.tracebacks import text_of


@dataclass
class References:
    """What pickles refer to.

    Attributes:
        names: of modules, or of what a module may have; see ``user_code.needed_modules``.
        broadcasts: broadcast variables by number. Pickled by PySpark, they have their values in the
            task that unpickles them.
    """

    names: set[str] = field(default_factory=set)
    broadcasts: dict[int, Broadcast[Any]] = field(default_factory=dict)


class ClosurePickler(ReferencePickler):
    """Pickles for executors, and notes what the pickle refers to.

    Args:
        file: where it writes to.
        references: where it adds what it finds.
    """

    def __init__(self, file: io.BytesIO, references: References) -> None:
        super().__init__(file, references.names)
        self._references = references

    def reducer_override(self, value: Any) -> Any:
        """Called by the pickler for everything but numbers, texts and plain containers."""
        if not isinstance(value, Broadcast):
            return super().reducer_override(value)
        # Not PySpark's own way, which would send it along with the user's next function too.
        number = number_of(value)
        self._references.broadcasts[number] = value
        return _from_id, (number,)


def pickled(value: Any, references: References) -> bytes:
    """Pickle an object for executors.

    Args:
        value: the object.
        references: where what it refers to is added.
    """
    file = io.BytesIO()
    ClosurePickler(file, references).dump(value)
    return file.getvalue()


MAX_DEPTH = 8
"""How deep into attributes to look for the culprit."""


def require_picklable(name: str, value: Any) -> None:
    """Check that a Param's value can be sent to executors.

    Raises:
        ModelError: it cannot be sent; the message names the attribute at fault.
    """
    error = _pickling_error(value)
    if error is not None:
        advice = f"give a function that builds the {name} on each worker"
        raise ModelError(_refusal(name, value, error, advice)) from error


def pickled_or_refused(
    value: Any, parts: dict[str, Any], references: References, refuse: type[SparkDLError]
) -> bytes:
    """Pickle an object for executors.

    Args:
        value: the object.
        parts: what the user knows of it, by name, for messages.
        references: where what it refers to is added.
        refuse: what to raise.

    Raises:
        SparkDLError: it cannot be pickled; the message names the part at fault.
    """
    try:
        return pickled(value, references)
    except Exception as error:  # any __reduce__ may raise anything
        for name, part in parts.items():
            found = _pickling_error(part)
            if found is not None:
                advice = "create it in the function that runs there"
                raise refuse(_refusal(name, part, found, advice)) from error
        raise


def _refusal(name: str, value: Any, error: Exception, advice: str) -> str:
    path, culprit, reason = _find_culprit(name, value, error)
    kind = type(culprit).__name__
    if isinstance(culprit, Broadcast):
        return (
            f"{name} cannot be sent to the executors: {path} is a {kind} that cannot be used any "
            f"more: {reason}. Broadcast its value again"
        )
    if _is_sparks(culprit):
        return (
            f"{name} cannot be sent to the executors: {path} is a {kind} that exists only in the "
            "driver. Take what the function needs from it before, for example with collect() or "
            "toPandas()"
        )
    return (
        f"{name} cannot be sent to the executors: {path} is a {kind} that cannot be pickled "
        f"({text_of(reason)}). Create it inside the model on first use, leave it out with "
        f"__getstate__, or {advice}"
    )


def _is_sparks(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("pyspark", "py4j")


def _pickling_error(value: Any) -> Exception | None:
    try:
        pickled(value, References())
    except Exception as error:  # any __reduce__ may raise anything
        return error
    return None


def _find_culprit(path: str, value: Any, error: Exception) -> tuple[str, Any, Exception]:
    """Descend, as deep as possible, into the first part that fails on its own."""
    above: list[int] = []
    while len(above) < MAX_DEPTH and not _is_sparks(value):
        above.append(id(value))
        for name, part in _parts(value):
            part_error = None if id(part) in above else _pickling_error(part)
            if part_error is not None:
                path, value, error = f"{path}{name}", part, part_error
                break
        else:
            break
    return path, value, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, each with the Python expression that leads to it."""
    if isinstance(value, functools.partial):
        yield ".func", value.func
        yield from ((f".args[{i}]", part) for i, part in enumerate(value.args))
        yield from ((f".keywords[{k!r}]", part) for k, part in value.keywords.items())
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
        return
    if isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
        return
    if isinstance(value, (set, frozenset)):
        yield from ((f" (its element {part!r:.40})", part) for part in value)
        return
    if isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield "", value.__func__
        return
    if isinstance(value, (staticmethod, classmethod)):
        yield "", value.__func__
        return
    if isinstance(value, property):
        yield from (("", part) for part in (value.fget, value.fset, value.fdel) if part is not None)
        return
    if isinstance(value, types.FunctionType):
        yield from _variables(value)
    for name, part in getattr(value, "__dict__", {}).items():
        if name in ("_modules", "_parameters", "_buffers") and isinstance(part, dict):
            yield from ((f".{key}", inner) for key, inner in part.items())
        elif not (isinstance(value, type) and _is_pythons(name, part)):
            yield f".{name}", part
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):  # without a value
                yield f".{name}", getattr(value, name)


def _is_pythons(name: str, part: Any) -> bool:
    """Whether a member of a class is one that every class has."""
    return name.startswith("__") and not isinstance(part, types.FunctionType)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function uses: variables around it, global ones, and the defaults of its arguments."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable without a value yet
            yield f" (its variable '{name}')", cell.cell_contents
    for code in nested_code(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL" and step.argval in function.__globals__:
                name = str(step.argval)
                yield f" (its global variable '{name}')", function.__globals__[name]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((" (a default of its arguments)", part) for part in defaults)
