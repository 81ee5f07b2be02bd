"""Packs rows into few, large columns, because executors hand them to Python one value at a time.

Several columns of numbers become one array. An array becomes the bytes in which Spark itself keeps
it, which are copied in one piece. ``feed.packed`` takes the record batches apart.

Record batches of a few megabytes, besides, are read faster than those of Spark's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.feed.packed import (
    ELEMENTS,
    NUMBERED,
    name_of_numbers,
    names_of_lists,
    names_of_vectors,
)
from sparkdl.spark.catalyst.array_bytes import ArrayBytes, array_bytes
from sparkdl.spark.catalyst.jvm import is_of_connect
from sparkdl.spark.rows.columns import quoted

FEWEST_NUMBERS = 4
"""The fewest columns of one type that are worth an array."""
MOST_ARRAYS = 100
"""The most columns of arrays or vectors that are made into bytes. Planning and compiling that takes
30 ms a column in every job, three times as long in the first: 400 columns of 4 numbers in 4,000
rows took 23 s, and 3 s as they are."""


@dataclass(frozen=True, slots=True)
class Source:
    """A column before it is packed.

    Attributes:
        name: ``c0``, ``c1`` and so on; another name if it is to arrive as it is.
        column: the expression.
        kind: its type.
    """

    name: str
    column: Column
    kind: T.DataType


def packed(frame: DataFrame) -> DataFrame:
    """The same rows in fewer, larger columns.

    Args:
        frame: columns ``c0``, ``c1``, ..., and others.

    Returns:
        Rows whose record batches become those of ``frame`` again when they are ``unpacked``.
    """
    sources = [Source(field.name, quoted(field.name), field.dataType) for field in frame.schema]
    columns = packed_columns(sources, frame.sparkSession)
    return frame.select(*[column.alias(name) for name, column in columns.items()])


def packed_columns(sources: Sequence[Source], spark: SparkSession) -> dict[str, Column]:
    """The same columns packed into fewer, larger ones, by name.

    Args:
        sources: the columns.
        spark: the session that is to compute them.
    """
    arrays = sum(_element(each.kind) in ELEMENTS or _is_vector(each) for each in sources)
    in_bytes = array_bytes(spark) if 0 < arrays <= MOST_ARRAYS else None
    together = _numbers_together(sources)
    columns: dict[str, Column] = {}
    for source in sources:
        if source.name in together:
            numbers = together[source.name]
            if source is numbers[0]:
                name = name_of_numbers([each.name for each in numbers])
                columns[name] = F.array(*[each.column for each in numbers])
        elif _is_vector(source):
            columns |= _packed_vector(source, in_bytes)
        elif _element(source.kind) in ELEMENTS:
            columns |= _packed_array(source, in_bytes)
        else:
            columns[source.name] = source.column
    return columns


def _element(kind: T.DataType) -> str | None:
    return kind.elementType.simpleString() if isinstance(kind, T.ArrayType) else None


def _is_vector(source: Source) -> bool:
    return isinstance(source.kind, VectorUDT)


def _numbers_together(sources: Sequence[Source]) -> dict[str, list[Source]]:
    """For each column of numbers, all those of its type, where that is enough for an array."""
    kinds: dict[str, list[Source]] = {}
    for source in sources:
        if source.kind.simpleString() in ELEMENTS and NUMBERED.fullmatch(source.name):
            kinds.setdefault(source.kind.simpleString(), []).append(source)
    groups = [numbers for numbers in kinds.values() if len(numbers) >= FEWEST_NUMBERS]
    return {source.name: numbers for numbers in groups for source in numbers}


def _packed_vector(source: Source, in_bytes: ArrayBytes | None) -> dict[str, Column]:
    """The parts of a column of vectors: the kind of each, then columns of arrays."""
    parts = F.unwrap_udt(source.column)
    kinds, indices, values = names_of_vectors(source.name)
    kind = F.struct(parts["type"], parts["size"])
    return {
        kinds: F.when(source.column.isNotNull(), kind),
        indices: F.coalesce(parts["indices"], _no_numbers(T.ArrayType(T.IntegerType()))),
        **_packed_array(Source(values, parts["values"], T.ArrayType(T.DoubleType())), in_bytes),
    }


def _packed_array(source: Source, in_bytes: ArrayBytes | None) -> dict[str, Column]:
    """A column of arrays as bytes, plus the rest; unchanged where this Spark cannot do that."""
    if in_bytes is None:
        return {source.name: source.column}
    content = in_bytes.of(source.column, source.kind)
    name, rest = names_of_lists(source.name, str(_element(source.kind)))
    return {
        name: content.cast("binary"),
        rest: F.when(content.isNull(), source.column).otherwise(_no_numbers(source.kind)),
    }


def _no_numbers(kind: T.DataType) -> Column:
    """An empty array for rows that need none: at each null, Spark rescans all rows before it."""
    return F.array().cast(kind)


SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
RECORD_BATCH_BYTES = 2 << 20
"""A record batch of this size is still in the processor's cache when it is checked and stored.
Spark's default is 10,000 rows, 31 MB at 784 floats each: reading those took a quarter longer."""
COLUMN_BYTES = 4 << 10
"""What each column has in a record batch, even if that becomes larger: checking fewer numbers takes
as long as these, 50 us."""


@contextmanager
def small_record_batches(spark: SparkSession, columns: int = 1) -> Iterator[None]:
    """Have the Spark jobs of this thread send about ``RECORD_BATCH_BYTES`` at a time.

    Of many columns it is ``COLUMN_BYTES`` for each.

    Executors learn of it from a job property, which the session's setting of the same name
    overrides: nobody else's jobs change, and users who have set it get what they set.

    A client of Spark Connect cannot set one.
    """
    if is_of_connect(spark):
        yield
        return
    context = spark.sparkContext
    before = context.getLocalProperty(SETTING)
    context.setLocalProperty(SETTING, str(max(RECORD_BATCH_BYTES, columns * COLUMN_BYTES)))
    try:
        yield
    finally:
        context.setLocalProperty(SETTING, before)  # type: ignore[arg-type] # None removes it
