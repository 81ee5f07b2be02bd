"""Rows in few, large columns, because executors hand them to Python one value at a time.

Several columns of numbers become one array. An array becomes the bytes in which Spark itself keeps
it, which are copied at once. ``feed.packed`` takes the record batches apart again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
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

logger = logging.getLogger(__name__)

FEWEST_NUMBERS = 4
"""Columns of the same type that are worth an array."""
_UNSAFE = "org.apache.spark.sql.catalyst.expressions.UnsafeArrayData"
_COLUMNAR = "org.apache.spark.sql.vectorized.ColumnarArray"


@dataclass(frozen=True, slots=True)
class Source:
    """A column before it is packed.

    Attributes:
        name: ``c0``, ``c1`` and so on; or another if it is to come as it is.
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
        Rows whose record batches ``feed.packed.unpacked`` turns into those of ``frame``.
    """
    sources = [Source(field.name, F.col(field.name), field.dataType) for field in frame.schema]
    columns = packed_columns(sources, frame.sparkSession)
    return frame.select(*[column.alias(name) for name, column in columns.items()])


def packed_columns(sources: Sequence[Source], spark: SparkSession) -> dict[str, Column]:
    """The same columns as fewer, larger ones, by their names.

    Args:
        sources: the columns.
        spark: the session that is to compute them.
    """
    together = _numbers_together(sources)
    columns: dict[str, Column] = {}
    for source in sources:
        numbers = together.get(source.name, [])
        if numbers:
            name = name_of_numbers([each.name for each in numbers])
            columns[name] = F.array(*[each.column for each in numbers])
        elif isinstance(source.kind, VectorUDT):
            columns |= _packed_vector(source, spark)
        elif _element(source.kind) in ELEMENTS:
            columns |= _packed_array(source, spark)
        else:
            columns[source.name] = source.column
    return columns


def _element(kind: T.DataType) -> str | None:
    return kind.elementType.simpleString() if isinstance(kind, T.ArrayType) else None


def _numbers_together(sources: Sequence[Source]) -> dict[str, list[Source]]:
    """By the name of each number all those of its type, where that is enough for an array."""
    kinds: dict[str, list[Source]] = {}
    for source in sources:
        if source.kind.simpleString() in ELEMENTS and NUMBERED.fullmatch(source.name):
            kinds.setdefault(source.kind.simpleString(), []).append(source)
    groups = [numbers for numbers in kinds.values() if len(numbers) >= FEWEST_NUMBERS]
    return {source.name: numbers for numbers in groups for source in numbers}


def _packed_vector(source: Source, spark: SparkSession) -> dict[str, Column]:
    """The parts of a column of vectors: what they are, then columns of arrays."""
    parts = F.unwrap_udt(source.column)
    kinds, indices, values = names_of_vectors(source.name)
    kind = F.struct(parts["type"], parts["size"])
    return {
        kinds: F.when(source.column.isNotNull(), kind),
        indices: F.coalesce(parts["indices"], _no_numbers(T.ArrayType(T.IntegerType()))),
        **_packed_array(Source(values, parts["values"], T.ArrayType(T.DoubleType())), spark),
    }


def _packed_array(source: Source, spark: SparkSession) -> dict[str, Column]:
    """A column of arrays as bytes and what is left; as it is where this Spark cannot do that."""
    try:
        content = Column(_ArrayBytes(spark._jvm).of(source))
    except (Py4JError, TypeError) as error:
        logger.info("arrays are handed to Python as they are, not as bytes: %s", error)
        return {source.name: source.column}
    in_bytes, rest = names_of_lists(source.name, str(_element(source.kind)))
    return {
        in_bytes: content.cast("binary"),
        rest: F.when(content.isNull(), source.column).otherwise(_no_numbers(source.kind)),
    }


def _no_numbers(kind: T.DataType) -> Column:
    """An empty array, for rows that need none: at each null Spark goes over all rows before it."""
    return F.array().cast(kind)


class _ArrayBytes:
    """Builds the expression that gives the memory of an array; null for arrays of other kinds.

    SQL has no function for that, so it is put together from methods of Spark's own classes, which
    run on the executors: ``UTF8String.fromAddress(array.copy().getBaseObject(), ...)``. Arrays that
    have been in a row or in a columnar file are copied into one piece of memory, as an
    ``UnsafeArrayData``. Others, like constants, are not.
    """

    def __init__(self, jvm: Any) -> None:
        self._jvm = jvm
        sql = self._jvm.org.apache.spark.sql
        self._catalyst, self._types = sql.catalyst.expressions, sql.types
        self._bridge = sql.classic.ExpressionUtils

    def of(self, source: Source) -> Any:
        """The bytes of an array column, for the JVM a column of text that is none."""
        array = self._bridge.expression(source.column._jc)
        kind = self._sql_type(source.kind.simpleString())
        unsafe = self._class(_UNSAFE)
        copied = self._catalyst.If(
            self._catalyst.Or(self._is(array, _UNSAFE), self._is(array, _COLUMNAR)),
            self._call(
                self._literal(unsafe),
                "cast",
                self._types.ObjectType(unsafe),
                self._call(array, "copy", kind),
            ),
            self._catalyst.Literal.create(None, self._types.ObjectType(unsafe)),
        )
        address = (
            self._call(copied, "getBaseObject", self._object("java.lang.Object")),
            self._call(copied, "getBaseOffset", self._sql_type("long")),
            self._call(copied, "getSizeInBytes", self._sql_type("int")),
        )
        memory = self._catalyst.objects.StaticInvoke(
            self._class("org.apache.spark.unsafe.types.UTF8String"),
            self._sql_type("string"),
            "fromAddress",
            self._list(*address),
            self._list(),
            True,  # null if an argument is
            True,  # may be null
            True,  # deterministic
            self._jvm.scala.Option.apply(None),
        )
        return self._bridge.column(memory)

    def _is(self, value: Any, name: str) -> Any:
        return self._call(
            self._literal(self._class(name)), "isInstance", self._sql_type("boolean"), value
        )

    def _literal(self, java_class: Any) -> Any:
        return self._catalyst.Literal.create(java_class, self._object("java.lang.Class"))

    def _call(self, target: Any, method: str, result: Any, *arguments: Any) -> Any:
        return self._catalyst.objects.Invoke(
            target, method, result, self._list(*arguments), self._list(), True, True, True
        )

    def _class(self, name: str) -> Any:
        return self._jvm.java.lang.Class.forName(name)

    def _object(self, name: str) -> Any:
        return self._types.ObjectType(self._class(name))

    def _sql_type(self, name: str) -> Any:
        return self._types.DataType.fromDDL(name)

    def _list(self, *items: Any) -> Any:
        return self._jvm.PythonUtils.toSeq(list(items))
