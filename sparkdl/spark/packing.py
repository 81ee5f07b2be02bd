"""Rows in few, large columns, because executors hand them to Python one value at a time.

Several columns of numbers become one array. An array becomes the bytes in which Spark itself keeps
it, which are copied at once. ``feed.packed`` takes the record batches apart again.
"""

from __future__ import annotations

import logging
from typing import Any

from py4j.protocol import Py4JError
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.feed.columns import ORDER_COLUMN
from sparkdl.feed.packed import ELEMENTS, name_of_numbers, names_of_lists, names_of_vectors

logger = logging.getLogger(__name__)

FEWEST_NUMBERS = 4
"""Columns of the same type that are worth an array."""
_UNSAFE = "org.apache.spark.sql.catalyst.expressions.UnsafeArrayData"
_COLUMNAR = "org.apache.spark.sql.vectorized.ColumnarArray"


def packed(frame: DataFrame) -> DataFrame:
    """The same rows in fewer, larger columns.

    Args:
        frame: columns ``c0``, ``c1``, ..., then perhaps ``ORDER_COLUMN``.

    Returns:
        Rows whose record batches ``feed.packed.unpacked`` turns into those of ``frame``.
    """
    together = _numbers_together(frame.schema)
    columns: list[Column] = []
    for field in frame.schema.fields:
        kind, names = field.dataType, together.get(field.name, [])
        if names:
            if names[0] == field.name:
                columns.append(F.array(*names).alias(name_of_numbers(names)))
        elif isinstance(kind, T.ArrayType) and kind.elementType.simpleString() in ELEMENTS:
            columns += _packed_array(frame, F.col(field.name), field.name, kind.elementType)
        elif isinstance(kind, VectorUDT):
            columns += _packed_vector(frame, field.name)
        else:
            columns.append(F.col(field.name))
    return frame.select(*columns)


def _numbers_together(schema: T.StructType) -> dict[str, list[str]]:
    """By each column of numbers all those of its type, where that is enough for an array."""
    kinds: dict[str, list[str]] = {}
    for field in schema.fields:
        if field.dataType.simpleString() in ELEMENTS and field.name != ORDER_COLUMN:
            kinds.setdefault(field.dataType.simpleString(), []).append(field.name)
    groups = [names for names in kinds.values() if len(names) >= FEWEST_NUMBERS]
    return {name: names for names in groups for name in names}


def _packed_vector(frame: DataFrame, name: str) -> list[Column]:
    """The parts of a column of vectors: what they are, then two columns of arrays."""
    parts = F.unwrap_udt(name)
    kind, indices, values = names_of_vectors(name)
    return [
        F.when(F.col(name).isNotNull(), F.struct(parts["type"], parts["size"])).alias(kind),
        F.coalesce(parts["indices"], _no_numbers(T.IntegerType())).alias(indices),
        *_packed_array(frame, parts["values"], values, T.DoubleType()),
    ]


def _packed_array(frame: DataFrame, array: Column, name: str, element: T.DataType) -> list[Column]:
    """A column of arrays as bytes and what is left; as it is where this Spark cannot do that."""
    try:
        content = Column(_ArrayBytes(frame.sparkSession._jvm).of(array, element))
    except (Py4JError, TypeError) as error:
        logger.info("arrays are handed to Python as they are, not as bytes: %s", error)
        return [array.alias(name)]
    in_bytes, rest = names_of_lists(name, element.simpleString())
    return [
        content.cast("binary").alias(in_bytes),
        F.when(content.isNull(), array).otherwise(_no_numbers(element)).alias(rest),
    ]


def _no_numbers(element: T.DataType) -> Column:
    """An empty array, for rows that need none: at each null Spark goes over all rows before it."""
    return F.array().cast(T.ArrayType(element))


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

    def of(self, array: Column, element: T.DataType) -> Any:
        """The bytes of an array column, for the JVM a column of text that is none."""
        source = self._bridge.expression(array._jc)
        kind = self._sql_type(T.ArrayType(element).simpleString())
        unsafe = self._class(_UNSAFE)
        copied = self._catalyst.If(
            self._catalyst.Or(self._is(source, _UNSAFE), self._is(source, _COLUMNAR)),
            self._call(
                self._literal(unsafe),
                "cast",
                self._types.ObjectType(unsafe),
                self._call(source, "copy", kind),
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
