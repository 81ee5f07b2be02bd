"""From a DataFrame's schema to what workers receive: which columns, by which expression."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.errors import DataError

_INTEGRAL = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_FRACTIONAL = (T.FloatType, T.DoubleType)

_FIXES: tuple[tuple[type[T.DataType], str], ...] = (
    (T.StringType, "index it with pyspark.ml.feature.StringIndexer, or cast it to a number"),
    (T.DecimalType, "cast it: F.col(name).cast('double')"),
    (T.TimestampType, "take numbers from it: F.unix_timestamp, F.hour, F.dayofweek"),
    (T.TimestampNTZType, "take numbers from it: F.hour, F.dayofweek, F.dayofyear"),
    (T.DateType, "take numbers from it: F.dayofyear, F.dayofweek, F.datediff"),
    (T.BinaryType, "decode it to array<float> before"),
    (T.StructType, "select its numeric fields as columns of their own"),
    (T.MapType, "select its values as columns of their own"),
)


@dataclass(frozen=True, slots=True)
class InputColumn:
    """One column of the user's DataFrame that feeds the model.

    Attributes:
        name: as the user knows it.
        type_name: its SQL type, for messages.
        integral: whether its numbers are integers or booleans.
        is_array: whether a row holds several numbers (array or vector).
        element_type: the SQL type of an array's elements, else of the column.
        may_hold_nulls: whether its arrays may hold null elements.
        is_vector: whether it is pyspark.ml's VectorUDT.
    """

    name: str
    type_name: str
    integral: bool
    is_array: bool
    element_type: str
    may_hold_nulls: bool = False
    is_vector: bool = False

    def tensor_dtype(self, fractions: torch.dtype) -> torch.dtype:
        """int64 for integers and booleans, as embeddings take them; else ``fractions``."""
        return torch.int64 if self.integral else fractions

    def expression(self, *, precise: bool = False) -> Column:
        """The column as workers receive it: a number, or an array of numbers.

        Args:
            precise: whether vectors keep their 64 bits a number.
        """
        column = quoted(self.name)
        if not self.is_vector:
            return column
        values = vector_to_array(column, dtype="float64" if precise else "float32")
        # It raises on null, which the checks are to count and name.
        return F.when(column.isNotNull(), values)


def quoted(name: str) -> Column:
    """A column by its exact name, whatever characters it has."""
    return F.col("`" + name.replace("`", "``") + "`")


def input_column(frame: DataFrame, name: str, param: str) -> InputColumn:
    """Look a column up and see whether it can feed a model.

    Args:
        frame: the user's DataFrame.
        name: the column's name.
        param: the Param that names it, for messages.

    Raises:
        DataError: the column is missing or doubled, or of a type that is no number.
    """
    found = [field for field in frame.schema.fields if field.name == name]
    if not found:
        raise DataError(
            f"{param} names the column '{name}', which the DataFrame does not have. "
            f"It has: {', '.join(frame.columns)}"
        )
    if len(found) > 1:
        raise DataError(
            f"{param} names the column '{name}', which the DataFrame has {len(found)} times. "
            "Drop or rename the others, for example after a join: df.drop(other['key'])"
        )
    kind = found[0].dataType
    type_name = kind.simpleString()
    if isinstance(kind, VectorUDT):
        return InputColumn(name, type_name, False, True, "double", is_vector=True)
    if isinstance(kind, T.ArrayType) and isinstance(kind.elementType, _INTEGRAL + _FRACTIONAL):
        integral = isinstance(kind.elementType, _INTEGRAL)
        element = kind.elementType.simpleString()
        return InputColumn(name, type_name, integral, True, element, kind.containsNull)
    if isinstance(kind, (T.BooleanType, *_INTEGRAL)):
        return InputColumn(name, type_name, True, False, type_name)
    if isinstance(kind, _FRACTIONAL):
        return InputColumn(name, type_name, False, False, type_name)
    fix = next(
        (fix for refused, fix in _FIXES if isinstance(kind, refused)),
        "convert it to a number or an array of numbers",
    )
    raise DataError(
        f"column '{name}' ({param}) has type {type_name}, which cannot become a tensor: {fix}. "
        "Numbers, booleans, arrays of numbers and pyspark.ml vectors can"
    )
