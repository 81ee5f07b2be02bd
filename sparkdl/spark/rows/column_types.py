"""Which Spark types arrive in which encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from sparkdl.encodings import BYTES, NUMBERS, PIXELS, VECTOR, Encoding, pixels, register

_INTEGRAL = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.BooleanType)
_FRACTIONAL = (T.FloatType, T.DoubleType, T.DecimalType)


@dataclass(frozen=True, slots=True)
class RowType:
    """What a column's type says about its rows.

    Attributes:
        integral: whether their numbers are integers or booleans.
        dimensions: those of one row's value: 0 for a number, 1 for an array or vector;
            None for bytes, which do not say.
    """

    integral: bool
    dimensions: int | None = 0


Recognize = Callable[[T.DataType], RowType | None]
"""Tells what the rows of a type are; None if they arrive in another encoding."""


def register_column_type(encoding: Encoding, recognize: Recognize) -> None:
    """Let columns of a type feed models.

    Args:
        encoding: how they arrive; it is registered too.
        recognize: tells whether a type arrives in this encoding.

    Raises:
        ValueError: another encoding already has this name.
    """
    register(encoding)
    _types.pop(encoding, None)  # an earlier definition equals this one, and would stay as the key
    _types[encoding] = recognize


def recognized(kind: T.DataType) -> tuple[Encoding, RowType] | None:
    """How a column of a type arrives, and what its rows are; None if it cannot feed a model."""
    found = ((encoding, recognize(kind)) for encoding, recognize in _types.items())
    return next(((encoding, rows) for encoding, rows in found if rows is not None), None)


def without_decimals(kind: T.DataType) -> T.DataType:
    """The type that a column arrives as: decimals, also in arrays, are cast to doubles."""
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(without_decimals(kind.elementType), kind.containsNull)
    return T.DoubleType() if isinstance(kind, T.DecimalType) else kind


def _numbers(kind: T.DataType) -> RowType | None:
    dimensions = 0
    while isinstance(kind, T.ArrayType):
        kind = kind.elementType
        dimensions += 1
    integral = isinstance(kind, _INTEGRAL)
    return RowType(integral, dimensions) if integral or isinstance(kind, _FRACTIONAL) else None


def _vector(kind: T.DataType) -> RowType | None:
    return RowType(False, 1) if isinstance(kind, VectorUDT) else None


def _bytes(kind: T.DataType) -> RowType | None:
    return RowType(True, None) if isinstance(kind, T.BinaryType) else None


def _pixels(kind: T.DataType) -> RowType | None:
    image = isinstance(kind, T.StructType) and kind.names == pixels.FIELDS
    return RowType(True, 3) if image else None


_types: dict[Encoding, Recognize] = {
    NUMBERS: _numbers,
    VECTOR: _vector,
    BYTES: _bytes,
    PIXELS: _pixels,
}
