"""What to do about a module that a worker lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
