"""Pickles of the user's for other processes, and the modules that these need.

A pickle holds the classes and functions of importable modules by name, and those of ``__main__`` by
value. So it needs the modules that are named in it, and also those that its functions by value
import when they are called.
"""

from __future__ import annotations

import dis
import io
import logging
import os
import pickle
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle

logger = logging.getLogger(__name__)

_IMPORT = dis.opmap["IMPORT_NAME"]
INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


@dataclass(frozen=True)
class ValueOf:
    """Has the ``value`` of a broadcast variable of PySpark's, in other processes."""

    value: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> ValueOf:
        return self


def is_of_spark(value: Any, name: str) -> bool:
    """Whether an object is of PySpark's class of a name, which may not be installed."""
    kind = type(value)
    return kind.__name__ == name and kind.__module__.startswith("pyspark.")


def plain(value: Any) -> Any:
    """The ``ValueOf`` of a broadcast variable; any other object itself.

    Raises:
        PicklingError: the broadcast variable cannot be used any more.
    """
    if not is_of_spark(value, "Broadcast"):
        return value
    if not os.path.exists(value._path):  # although the driver may still have its value
        raise pickle.PicklingError("it was destroyed, or its Spark session was stopped")
    return ValueOf(value.value)


class ReferencePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's, which also notes what its pickle will look for.

    Broadcast variables become their values. PySpark's own way would send them along with the next
    function of the user's that it pickles, and only to Spark's own processes.

    Args:
        file: where it writes to.
        names: where it adds dotted names: of modules, or of what a module may have.
        counts: whether what is added to accumulators is counted.
    """

    def __init__(self, file: io.BytesIO, names: set[str], counts: bool = False) -> None:
        super().__init__(file)
        self._names, self._counts = names, counts

    def reducer_override(self, value: Any) -> Any:
        """Called by the pickler for everything but numbers, texts and plain containers."""
        if (replaced := plain(value)) is not value:
            return ValueOf, (replaced.value,)
        if is_of_spark(value, "Accumulator") and not self._counts:
            raise pickle.PicklingError(
                "an accumulator, which counts only in sparkdl.run: a fit and a model call your "
                "functions for trial too, and again after a loss. Measure with 'metrics', or sum "
                "up a column of what transform returns"
            )
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


def pickled(value: Any, names: set[str], *, counts: bool = False) -> bytes:
    """Pickle an object for other processes; see ``ReferencePickler``."""
    file = io.BytesIO()
    ReferencePickler(file, names, counts).dump(value)
    return file.getvalue()


def takes_along(value: Any, others: Iterable[Any]) -> bool:
    """Whether a pickle of an object, as far as it can be pickled, would hold one of some others."""
    wanted = set(map(id, others))

    class Seeker(ReferencePickler):
        def reducer_override(self, each: Any) -> Any:
            if id(each) in wanted:
                raise _FoundError
            if type(each).__module__ == "torch.storage":
                return object, ()  # it refers to nothing, and may be a large network's values
            return super().reducer_override(each)

    try:
        Seeker(io.BytesIO(), set()).dump(value)
    except _FoundError:
        return True
    except Exception as error:  # a callback in the driver may hold anything
        logger.debug("was not looked through to its end: %s", error)
    return False


class _FoundError(Exception):
    """There is no need to pickle the rest."""


def imported_names(code: types.CodeType, package: str | None = None) -> Iterator[str]:
    """What a piece of code imports, also within functions.

    Args:
        code: of a module or function.
        package: whose parts relative imports take; None leaves them out.

    Yields:
        The dotted names of modules.
    """
    for each in nested_code(code):
        if _IMPORT not in each.co_code[::2]:
            continue
        steps = [step for step in dis.get_instructions(each) if step.opname != "EXTENDED_ARG"]
        for level, step in zip(steps, steps[2:], strict=False):
            if step.opcode == _IMPORT and (name := package if level.argval else step.argval):
                yield str(name)


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

_skipped: dict[str, str] = {}


@contextmanager
def skipped_modules(reasons: Mapping[str, str]) -> Iterator[None]:
    """Know meanwhile why modules of the user's own did not come along.

    Args:
        reasons: by dotted name; each continues a sentence that begins with the name.
    """
    before = dict(_skipped)
    _skipped.update(reasons)
    try:
        yield
    finally:
        _skipped.clear()
        _skipped.update(before)


def advice(error: ModuleNotFoundError) -> str:
    """What to do about a module that was not found, for the end of a message."""
    name = (error.name or "").partition(".")[0]
    if name in _skipped:
        return f"The module {name} {_skipped[name]}. {HOW_OTHERS_TRAVEL}"
    return _TRAVEL
