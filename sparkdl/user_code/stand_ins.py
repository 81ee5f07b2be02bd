"""What stands in for an object of Spark's where there is no Spark: a plain one with its value."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

_MAKERS: dict[type, Callable[[Any], object]] = {}


def stands_in(kind: type, make: Callable[[Any], object]) -> None:
    """Register a function that makes stand-ins.

    Args:
        kind: the class of the objects that it takes.
        make: returns one that can be pickled, and that is the same for the same value.
    """
    _MAKERS[kind] = make


def stand_in(value: Any) -> Any:
    """What stands in for an object; itself if nothing does."""
    make = _MAKERS.get(type(value))
    return value if make is None else make(value)


def pickled_apart(value: Any) -> bytes:
    """Pickle an object for a process that has no part in Spark's application."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        replaced = stand_in(value)
        return super().reducer_override(value) if replaced is value else (_itself, (replaced,))


def _itself(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class ValueOf:
    """Stands in for a broadcast variable.

    Attributes:
        value: the same.
    """

    value: Any


@dataclass(frozen=True)
class Uncounted:
    """Stands in for an accumulator: what is added to it, nobody sees.

    Attributes:
        accum_param: the same; it says how to add.
    """

    accum_param: Any

    def add(self, term: Any) -> None:
        """Like an accumulator's."""

    def __iadd__(self, term: Any) -> Uncounted:
        return self
