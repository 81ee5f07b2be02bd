"""Packs rows into few, large columns, because executors hand them to Python one value at a time.

Several columns of numbers become one array. An array becomes the bytes in which Spark itself keeps
it, which are copied in one piece. ``feed.record_batches.packed`` takes the record batches apart.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.feed.record_batches.packed import (
    ELEMENTS,
    NUMBERED,
    name_of_numbers,
    names_of_lists,
    names_of_vectors,
)
from sparkdl.spark.rows.columns import quoted

logger = logging.getLogger(__name__)

FEWEST_NUMBERS = 4
"""The fewest columns of one type that are worth an array."""
_UNSAFE = "org.apache.spark.sql.catalyst.expressions.UnsafeArrayData"
_COLUMNAR = "org.apache.spark.sql.vectorized.ColumnarArray"
_SAMPLE = (1.5, -2.0, 3.25)
_BYTES_OF_SAMPLE = struct.pack("<qQ3d", len(_SAMPLE), 0, *_SAMPLE)
"""The number of values, one null bit for each, and the values."""
_reads_right: dict[str, bool] = {}
"""By Spark application, whether the bytes of a sample were right; checked once in each."""


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
    if not any(_element(each.kind) in ELEMENTS or _is_vector(each) for each in sources):
        return _packed_columns(sources, None)
    try:
        in_bytes = _ArrayBytes(spark._jvm)
        application = spark.sparkContext.applicationId
        if application not in _reads_right:
            _reads_right[application] = in_bytes.of_sample(spark) == _BYTES_OF_SAMPLE
        if _reads_right[application]:
            return _packed_columns(sources, in_bytes)
        why = "this Spark stores them in a different layout"
    except (Py4JError, TypeError) as error:
        why = f"this Spark lacks one of its methods: {error}"
    logger.info("arrays are passed to Python as they are, not as bytes: %s", why)
    return _packed_columns(sources, None)


def _packed_columns(sources: Sequence[Source], in_bytes: _ArrayBytes | None) -> dict[str, Column]:
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


def _packed_vector(source: Source, in_bytes: _ArrayBytes | None) -> dict[str, Column]:
    """The parts of a column of vectors: the kind of each, then columns of arrays."""
    parts = F.unwrap_udt(source.column)
    kinds, indices, values = names_of_vectors(source.name)
    kind = F.struct(parts["type"], parts["size"])
    return {
        kinds: F.when(source.column.isNotNull(), kind),
        indices: F.coalesce(parts["indices"], _no_numbers(T.ArrayType(T.IntegerType()))),
        **_packed_array(Source(values, parts["values"], T.ArrayType(T.DoubleType())), in_bytes),
    }


def _packed_array(source: Source, in_bytes: _ArrayBytes | None) -> dict[str, Column]:
    """A column of arrays as bytes, plus the rest; unchanged where this Spark cannot do that."""
    if in_bytes is None:
        return {source.name: source.column}
    content = Column(in_bytes.of(source))
    name, rest = names_of_lists(source.name, str(_element(source.kind)))
    return {
        name: content.cast("binary"),
        rest: F.when(content.isNull(), source.column).otherwise(_no_numbers(source.kind)),
    }


def _no_numbers(kind: T.DataType) -> Column:
    """An empty array for rows that need none: at each null, Spark rescans all rows before it."""
    return F.array().cast(kind)


class _ArrayBytes:
    """Builds the expression for an array's raw memory; null for other kinds of arrays.

    SQL has no function for that, so it is built from methods of Spark's own classes, which run on
    the executors: ``UTF8String.fromAddress(array.copy().getBaseObject(), ...)``. Arrays from a row
    or a columnar file are copied into one piece of memory, as an ``UnsafeArrayData``. Others, such
    as constants, are not.

    Each step towards a name in the JVM is a message, so what all columns need is looked up once.
    """

    def __init__(self, jvm: Any) -> None:
        catalyst, types = (
            jvm.org.apache.spark.sql.catalyst.expressions,
            jvm.org.apache.spark.sql.types,
        )
        self._bridge = jvm.org.apache.spark.sql.classic.ExpressionUtils
        self._invoke, self._invoke_static = catalyst.objects.Invoke, catalyst.objects.StaticInvoke
        self._if, self._or = catalyst.If, catalyst.Or
        self._sql_type, self._sequence = types.DataType.fromDDL, jvm.PythonUtils.toSeq
        self._nothing, self._none = self._sequence([]), jvm.scala.Option.apply(None)
        named, literal, object_of = (
            jvm.java.lang.Class.forName,
            catalyst.Literal.create,
            types.ObjectType,
        )
        unsafe, class_type = named(_UNSAFE), object_of(named("java.lang.Class"))
        self._unsafe = literal(unsafe, class_type)
        self._columnar = literal(named(_COLUMNAR), class_type)
        self._unsafe_type = object_of(unsafe)
        self._no_array = literal(None, self._unsafe_type)
        self._text_class = named("org.apache.spark.unsafe.types.UTF8String")
        self._object_type = object_of(named("java.lang.Object"))
        self._boolean, self._long, self._int, self._string = map(
            self._sql_type, ("boolean", "long", "int", "string")
        )

    def of(self, source: Source) -> Any:
        """The bytes of an array column, which the JVM takes for a column of text."""
        array = self._bridge.expression(source.column._jc)
        itself = self._sequence([array])
        copy = self._call(array, "copy", self._sql_type(source.kind.simpleString()))
        memory = self._if(
            self._or(
                self._call(self._unsafe, "isInstance", self._boolean, itself),
                self._call(self._columnar, "isInstance", self._boolean, itself),
            ),
            self._call(self._unsafe, "cast", self._unsafe_type, self._sequence([copy])),
            self._no_array,
        )
        address = (
            self._call(memory, "getBaseObject", self._object_type),
            self._call(memory, "getBaseOffset", self._long),
            self._call(memory, "getSizeInBytes", self._int),
        )
        text = self._invoke_static(
            self._text_class,
            self._string,
            "fromAddress",
            self._sequence(list(address)),
            self._nothing,
            True,  # null if an argument is
            True,  # may be null
            True,  # deterministic
            self._none,
        )
        return self._bridge.column(text)

    def of_sample(self, spark: SparkSession) -> bytes:
        """The bytes of a sample, which the driver's JVM computes on its own, without a job."""
        gateway = spark.sparkContext._gateway
        assert gateway is not None
        numbers = gateway.new_array(gateway.jvm.double, len(_SAMPLE))
        for index, number in enumerate(_SAMPLE):
            numbers[index] = number
        expressions = gateway.jvm.org.apache.spark.sql.catalyst.expressions
        array = expressions.UnsafeArrayData.fromPrimitiveArray(numbers)
        kind = T.ArrayType(T.DoubleType())
        literal = expressions.Literal(array, self._sql_type(kind.simpleString()))
        source = Source("sample", Column(self._bridge.column(literal)), kind)
        return bytes(self._bridge.expression(self.of(source)).eval(None).getBytes())

    def _call(self, target: Any, method: str, result: Any, arguments: Any = None) -> Any:
        return self._invoke(
            target, method, result, arguments or self._nothing, self._nothing, True, True, True
        )
