"""The Params of the search for near-duplicates, and the columns that a DataFrame needs for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from sparkdl.arguments import require_whole
from sparkdl.dedup.hashing import HASHES
from sparkdl.encodings.pixels import FIELDS
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.params.declaration import Declaration, DeclaredParams, choice
from sparkdl.spark.rows.converters import nonempty_text, optional

LARGEST = 31
"""Of the thresholds: unrelated words differ in 32 bits on average."""


def _threshold(value: Any) -> int:
    number = require_whole("threshold", value, 0, "bits")
    if number > LARGEST:
        raise ConfigError(
            f"threshold must be at most {LARGEST} of the 64 bits, got {number}: two images that "
            "have nothing in common differ in about 32"
        )
    return number


class _ColumnParams(DeclaredParams, group="Columns"):
    inputCol = Declaration(
        str,
        nonempty_text,
        "image",
        "the column that is compared",
        "Binary values with an encoded image each, or Spark's image structs; texts for "
        "hash='simhash', longs for hash='given'.",
        named=True,
    )
    within = Declaration(
        str | None,
        lambda name: optional(nonempty_text(name)),
        "label",
        "the column whose equal values are compared with each other; None compares all rows",
        "Null is a value like another.",
        named=True,
    )
    keep = Declaration(
        str,
        nonempty_text,
        "id",
        "the column that decides which of near rows stays: that with the smallest value",
        "It must be unique, without null.",
        named=True,
    )


class DedupParams(_ColumnParams, group="Rows"):
    """What the estimator and its model have."""

    hash = choice(
        HASHES,
        "what two rows are compared by",
        "'dhash', 'ahash', 'phash' and 'whash' are hashes of images, as the imagehash package has "
        "them, 'simhash' is one of texts, and 'given' says that inputCol has hashes of 64 bits.",
    )
    threshold = Declaration(
        int,
        _threshold,
        4,
        "the most bits of 64 in which the hashes of near rows differ",
        "A model may have a smaller one than it was fitted with.",
    )
    mode = choice(
        ("filter", "mark"),
        "what transform returns: the rows that stay, or all of them, marked",
        "Marked rows have 'duplicate_of', the keep value of a row that stays, and 'distance'; both "
        "are null for rows that stay.",
    )


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


@dataclass(frozen=True)
class Columns:
    """The types of the columns of one DataFrame.

    Attributes:
        first: of the column ``keep``.
        group: of ``within``; None without one.
    """

    first: T.DataType
    group: T.DataType | None


def require_columns(params: DedupParams, frame: DataFrame) -> Columns:
    """Check the columns that Params name.

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
    return Columns(first, None if within is None else _comparable(frame, within, "within"))


def _comparable(frame: DataFrame, name: str, param: str) -> T.DataType:
    kind = _type_of(frame, name, param)
    if isinstance(kind, _PLAIN) or kind == T.StringType():
        return kind
    raise DataError(
        f"column '{name}' ({param}) has type {kind.simpleString()}; it must be a number, string, "
        "date, timestamp, boolean or binary value. Name a column made of it"
    )


def _type_of(frame: DataFrame, name: str, param: str) -> T.DataType:
    found = [field.dataType for field in frame.schema.fields if field.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(
            f"{param} names the column '{name}', which occurs {len(found)} times in the "
            "DataFrame. Drop or rename the others"
        )
    fix = ", or set within=None to compare all rows" if param == "within" else ""
    raise DataError(
        f"{param} names the column '{name}', which the DataFrame does not have. "
        f"It has: {', '.join(frame.columns)}. Name one of them{fix}"
    )
