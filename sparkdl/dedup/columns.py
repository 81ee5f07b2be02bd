"""Whether a DataFrame has the columns that a search for near-duplicates needs."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from sparkdl.dedup.params import DedupParams
from sparkdl.encodings.pixels import FIELDS
from sparkdl.errors import DataError
from sparkdl.spark.rows.columns import type_of

DUPLICATE_OF, DISTANCE = "duplicate_of", "distance"
"""The columns that marked rows have besides their own."""

_PLAIN = (
    T.NumericType,
    T.BooleanType,
    T.BinaryType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
)
"""Types, beside strings, whose values Spark compares and groups as Arrow does."""


def require_columns(params: DedupParams, frame: DataFrame) -> tuple[T.DataType, T.DataType | None]:
    """Check the columns that Params name; returns the types of ``keep`` and ``within``.

    Raises:
        DataError: one is missing, occurs twice, or has a type that does not do.
    """
    kind = params.getHash()
    value = _type_of(frame, params.getInputCol(), "inputCol")
    if kind == "simhash":
        takes, does = "strings", value == T.StringType()
    elif kind == "given":
        takes, does = "longs, one hash of 64 bits each", value == T.LongType()
    else:
        takes = "binary values with an encoded image each, or Spark's image structs"
        does = isinstance(value, T.BinaryType) or (
            isinstance(value, T.StructType) and value.names == FIELDS
        )
    if not does:
        raise DataError(
            f"column '{params.getInputCol()}' (inputCol) has type {value.simpleString()}, but "
            f"hash='{kind}' takes {takes}. Name another column, or set hash to what fits: images "
            "have 'dhash', 'ahash', 'phash' and 'whash', texts 'simhash'"
        )
    within = params.getWithin()
    if params.getKeep().lower() in (DUPLICATE_OF, DISTANCE):
        raise DataError(
            f"keep names the column '{params.getKeep()}', as a column is named that near rows are "
            "marked with. Rename it"
        )
    first = _comparable(frame, params.getKeep(), "keep")
    return first, None if within is None else _comparable(frame, within, "within")


def _comparable(frame: DataFrame, name: str, param: str) -> T.DataType:
    kind = _type_of(frame, name, param)
    if isinstance(kind, _PLAIN) or kind == T.StringType():
        return kind
    raise DataError(
        f"column '{name}' ({param}) has type {kind.simpleString()}; it must be a number, string, "
        "date, timestamp, boolean or binary value. Name a column made of it"
    )


def _type_of(frame: DataFrame, name: str, param: str) -> T.DataType:
    found = [field for field in frame.schema.fields if field.name == name]
    fix = ". Name one of them, or set within=None to compare all rows" if param == "within" else ""
    return type_of(frame, found, name, param, fix)
