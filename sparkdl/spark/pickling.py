"""What cannot be sent to executors is refused by the name of the part at fault."""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle

from sparkdl.errors import ConfigError, ModelError, SparkDLError
from sparkdl.user_code.needed_modules import is_of_spark, nested_code, pickled
from sparkdl.user_code.tracebacks import text_of

MAX_DEPTH = 8
"""How deep into attributes to look for the culprit."""


def require_picklable(name: str, value: Any) -> None:
    """Check that a Param's value can be sent to executors, which count for nobody.

    Raises:
        ModelError: it cannot be sent; the message names the attribute at fault.
    """
    error = _pickling_error(value, counts=False)
    if error is not None:
        advice = f"give a function that builds the {name} on each worker"
        raise ModelError(_refusal(name, value, error, advice, counts=False)) from error


def pickled_or_refused(
    value: Any, parts: dict[str, Any], names: set[str], refuse: type[SparkDLError]
) -> bytes:
    """Pickle an object for executors, which count for the driver.

    Args:
        value: the object.
        parts: what the user knows of it, by name, for messages.
        names: where the names of what it refers to are added; see ``ReferencePickler``.
        refuse: what to raise.

    Raises:
        SparkDLError: it cannot be pickled; the message names the part at fault.
    """
    try:
        return pickled(value, names, counts=True)
    except Exception as error:  # any __reduce__ may raise anything
        for name, part in parts.items():
            found = _pickling_error(part, counts=True)
            if found is not None:
                advice = "create it in the function that runs there"
                raise refuse(_refusal(name, part, found, advice, counts=True)) from error
        raise


def pickled_result(result: Any) -> bytes:
    """Pickle what a function has returned on a worker.

    Raises:
        ConfigError: it cannot be pickled; the message names the part at fault.
    """
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:  # any __reduce__ may raise anything
        path, culprit, reason = _find_culprit("its result", result, error, counts=False)
        raise ConfigError(
            f"what the function returned cannot be sent to the driver: {path} is a "
            f"{type(culprit).__name__} that cannot be pickled ({text_of(reason)}). Return numbers, "
            "tensors or a state_dict(), of a wrapped model that of its .module"
        ) from error


def _refusal(name: str, value: Any, error: Exception, advice: str, *, counts: bool) -> str:
    path, culprit, reason = _find_culprit(name, value, error, counts)
    kind = type(culprit).__name__
    if is_of_spark(culprit, "Broadcast"):
        return (
            f"{name} cannot be sent to the executors: {path} is a {kind} that cannot be used any "
            f"more: {reason}. Broadcast its value again"
        )
    if is_of_spark(culprit, "Accumulator"):
        return f"{name} cannot be sent to the executors: {path} is {reason}"
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


def _pickling_error(value: Any, *, counts: bool) -> Exception | None:
    try:
        pickled(value, set(), counts=counts)
    except Exception as error:  # any __reduce__ may raise anything
        return error
    return None


def _find_culprit(
    path: str, value: Any, error: Exception, counts: bool
) -> tuple[str, Any, Exception]:
    """Descend, as deep as possible, into the first part that fails on its own."""
    above: list[int] = []
    while len(above) < MAX_DEPTH and not _is_sparks(value):
        above.append(id(value))
        for name, part in _parts(value):
            part_error = None if id(part) in above else _pickling_error(part, counts=counts)
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
