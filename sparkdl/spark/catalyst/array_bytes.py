"""The bytes in which Spark itself keeps an array, as a column."""

from __future__ import annotations

import logging
import struct
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql import types as T

from sparkdl.spark.catalyst.jvm import Py4JError, is_of_connect
from sparkdl.spark.catalyst.versions import column_bridge

logger = logging.getLogger(__name__)

_STATIC_INVOKE = "org.apache.spark.sql.catalyst.expressions.objects.StaticInvoke"
_UNSAFE = "org.apache.spark.sql.catalyst.expressions.UnsafeArrayData"
_COLUMNAR = "org.apache.spark.sql.vectorized.ColumnarArray"
_SAMPLE = (1.5, -2.0, 3.25)
_BYTES_OF_SAMPLE = struct.pack("<qQ3d", len(_SAMPLE), 0, *_SAMPLE)
"""The number of values, one null bit for each, and the values."""
_made: dict[str, ArrayBytes | None] = {}
"""By Spark application, the last one's: looking all names up takes 15 ms."""


def array_bytes(spark: SparkSession) -> ArrayBytes | None:
    """What makes columns of arrays into bytes; None where this Spark cannot do that.

    Arrays are then handed to Python as they are, value by value.
    """
    if is_of_connect(spark):
        return None
    application = spark.sparkContext.applicationId
    if application not in _made:
        _made.clear()
        _made[application] = _make(spark)
    return _made[application]


def _make(spark: SparkSession) -> ArrayBytes | None:
    try:
        in_bytes = ArrayBytes(spark._jvm)
        if in_bytes.of_sample(spark) == _BYTES_OF_SAMPLE:
            return in_bytes
        why = "this Spark stores them in a different layout"
    except (Py4JError, TypeError, AttributeError) as error:
        why = f"this Spark lacks one of its methods: {error}"
    logger.info("arrays are passed to Python as they are, not as bytes: %s", why)
    return None


class ArrayBytes:
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
        self._expression, self._column = column_bridge(jvm)
        self._invoke, self._invoke_static = catalyst.objects.Invoke, catalyst.objects.StaticInvoke
        self._static_arguments = (
            jvm.java.lang.Class.forName(_STATIC_INVOKE).getConstructors()[0].getParameterCount()
        )
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

    def of(self, column: Column, kind: T.DataType) -> Column:
        """The bytes of an array column, which the JVM takes for a column of text."""
        return Column(self._of(column._jc, kind))

    def _of(self, column: Any, kind: T.DataType) -> Any:
        array = self._expression(column)
        itself = self._sequence([array])
        copy = self._call(array, "copy", self._sql_type(kind.simpleString()))
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
        arguments = (
            self._text_class,
            self._string,
            "fromAddress",
            self._sequence(list(address)),
            self._nothing,
            True,  # null if an argument is
            True,  # may be null
            True,  # deterministic
            self._none,  # from Spark 4.0 on
        )
        return self._column(self._invoke_static(*arguments[: self._static_arguments]))

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
        made = self._of(self._column(literal), kind)
        return bytes(self._expression(made).eval(None).getBytes())

    def _call(self, target: Any, method: str, result: Any, arguments: Any = None) -> Any:
        return self._invoke(
            target, method, result, arguments or self._nothing, self._nothing, True, True, True
        )
