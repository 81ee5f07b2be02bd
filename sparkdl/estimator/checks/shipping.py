"""Whether the user's objects can travel to the executors, and which part of them cannot."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import cloudpickle

from sparkdl.errors import ModelError

MAX_DEPTH = 8
"""How deep into attributes to look for the culprit."""


def require_picklable(name: str, value: Any) -> None:
    """Check that a Param's value can be sent to executors.

    Args:
        name: the Param.
        value: what it holds.

    Raises:
        ModelError: it cannot be sent; the message names the attribute at fault.
    """
    error = _pickling_error(value)
    if error is None:
        return
    path, culprit, reason = _find_culprit(name, value, error)
    raise ModelError(
        f"{name} cannot be sent to the executors: {path} is a {type(culprit).__name__} that cannot "
        f"be pickled ({reason}). Create it inside the model on first use, leave it out with "
        f"__getstate__, or give a function that builds the {name} on each worker"
    )


def _pickling_error(value: Any) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # any __reduce__ may raise anything
        return error
    return None


def _find_culprit(path: str, value: Any, error: Exception) -> tuple[str, Any, Exception]:
    """Descend, as deep as possible, into the first part that fails on its own."""
    for _ in range(MAX_DEPTH):
        for name, part in _parts(value):
            part_error = _pickling_error(part)
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
    closure = getattr(value, "__closure__", None)
    if closure:
        names = value.__code__.co_freevars
        for name, cell in zip(names, closure, strict=True):
            with contextlib.suppress(ValueError):  # a variable without a value yet
                yield f" (its variable '{name}')", cell.cell_contents
    for name, part in getattr(value, "__dict__", {}).items():
        if name in ("_modules", "_parameters", "_buffers") and isinstance(part, dict):
            yield from ((f".{key}", inner) for key, inner in part.items())
        elif not (isinstance(value, type) and name.startswith("__")):
            yield f".{name}", part
