"""What ``columns`` does where Spark passes series of pandas, before 4.1.

There a null among numbers is a NaN, integers beside it are floats, and a null struct is one of
nulls. So ``called_on`` has the JVM say where nulls are, and passes single numbers as arrays of one
or none, as a null would make floats of the others. A function for SQL is made before its columns
are known: there NaN is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyspark
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.encodings.linalg import VECTOR_FIELDS, VECTOR_TYPE
from sparkdl.errors import DataError
from sparkdl.spark.catalyst.versions import arrow_type
from sparkdl.spark.inference.columns import Arrays, Function, columns_of, struct_of
from sparkdl.spark.launch.environments import checked

EXACT = 1 << 53
"""Whole numbers below are the same as float64."""


def called_on(
    frame: DataFrame, inputs: Mapping[str, Column], function: Function, fields: Mapping[str, str]
) -> dict[str, Column]:
    """As in ``columns``."""
    columns = list(inputs.values())
    kinds = [field.dataType for field in frame.select(*columns).schema]
    alone = [isinstance(kind, T.NumericType) for kind in kinds]
    for index, single in enumerate(alone):
        if single:
            columns[index] = F.array_compact(F.array(columns[index]))
    flags = [
        F.lit(False) if single else flag
        for column, kind, single in zip(columns, kinds, alone, strict=True)
        for flag in (column.isNull(), _has_null(column, kind))
    ]
    nulls = F.array(*flags)
    lists = {
        name: sql if sql.startswith("array<") else f"array<{sql}>" for name, sql in fields.items()
    }
    known = _on_known_columns(function, [arrow_type(kind) for kind in kinds], alone)
    structs = _pandas_udf(known, struct_of(lists))(*columns, nulls)

    def restored(name: str, sql: str) -> Column:
        # Spark has made nulls of NaN. The array itself is null in a row without an answer.
        nan = F.lit(float("nan")).cast(sql.removeprefix("array<").removesuffix(">"))
        whole = F.transform(structs[name], lambda each: F.coalesce(each, nan))
        return whole if lists[name] == sql else whole[0]

    return {name: restored(name, sql) for name, sql in fields.items()}


def function_of_columns(function: Function, result: str, *, skips_nan: bool) -> Any:
    """As in ``columns``."""

    def on_any_columns(batches: Iterator[Any]) -> Iterator[Any]:
        def arrays() -> Iterator[Arrays]:
            for batch in batches:
                yield tuple(_inferred(column, skips_nan=skips_nan) for column in columns_of(batch))

        for answer in function(arrays()):
            if _holds_nan(answer):
                raise DataError(
                    f"a prediction is NaN, of which Spark {pyspark.__version__} would make NULL "
                    "in a function. Use transform, or Spark 4.1 or newer"
                )
            if isinstance(answer, pa.StructArray):
                yield _as_table(answer)
            else:
                yield answer.to_pandas()

    on_any_columns.__name__ = function.__name__  # which names the column
    return _pandas_udf(on_any_columns, result)


def _pandas_udf(function: Callable[[Iterator[Any]], Iterator[Any]], result: str) -> Any:
    function.__annotations__ = {
        "batches": Iterator[tuple[pd.Series, ...]],
        "return": Iterator[pd.Series],
    }
    return F.pandas_udf(checked(function), result)  # type: ignore[attr-defined]


def _any(conditions: Iterable[Column]) -> Column:
    found = F.lit(False)
    for each in conditions:
        found = found | each
    return found


def _has_null(column: Column, kind: T.DataType) -> Column:
    """Whether there is a null within the arrays and structs of a column, at any depth."""
    if isinstance(kind, T.ArrayType):
        element = kind.elementType
        inside = F.exists(column, lambda each: each.isNull() | _has_null(each, element))
    elif isinstance(kind, T.StructType):
        parts = [(column[field.name], field.dataType) for field in kind]
        inside = _any(part.isNull() | _has_null(part, of) for part, of in parts)
    else:
        return F.lit(False)
    return F.coalesce(inside, F.lit(False))


def _on_known_columns(
    function: Function, kinds: Sequence[pa.DataType], alone: Sequence[bool]
) -> Callable[[Iterator[Any]], Iterator[pd.DataFrame]]:
    def on_known_columns(batches: Iterator[Any]) -> Iterator[pd.DataFrame]:
        def arrays() -> Iterator[Arrays]:
            for *columns, flags in batches:
                nulls = np.array(list(flags), bool).reshape(len(flags), 2 * len(kinds)).T
                yield tuple(
                    _numbers(column, kind) if single else _array(column, kind, null, inside)
                    for column, kind, single, null, inside in zip(
                        columns, kinds, alone, nulls[::2], nulls[1::2], strict=True
                    )
                )

        for answer in function(arrays()):
            yield _as_table(answer, in_lists=True)

    return on_known_columns


def _numbers(column: Any, kind: pa.DataType) -> pa.Array:
    """Single numbers, of which each is an array of one, and null an empty one."""
    return pa.array([each[0] if len(each) else None for each in column], kind)


def _array(column: Any, kind: pa.DataType, null: np.ndarray, inside: np.ndarray) -> pa.Array:
    """A column as it was before pandas.

    Args:
        column: a series, or a table for structs.
        kind: its type.
        null: for each row, whether the column is null there.
        inside: for each row, whether it has a null within its arrays and structs.

    Raises:
        DataError: nulls have rounded integers.
    """
    if isinstance(column, pd.DataFrame):
        parts = [column.iloc[:, index] for index in range(len(kind))]
        fields = [
            _array(part, of.type, part.isnull().to_numpy(), inside)
            for part, of in zip(parts, kind, strict=True)
        ]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=pa.array(null))
    values = column.to_numpy(object, copy=True)
    values[null] = None
    for row in np.flatnonzero(inside & ~null):
        values[row] = _with_nulls(values[row], kind)
    made = pa.array(values, kind)
    numbers, beside_null = made, inside.any()
    if not pa.types.is_list(kind):
        beside_null |= null.any()
    while pa.types.is_list(numbers.type):
        numbers = numbers.flatten()
    if pa.types.is_int64(numbers.type) and beside_null and not _is_exact(numbers):
        raise DataError(
            f"integers beyond 2**53 are beside NULL in arrays, where Spark {pyspark.__version__} "
            "rounds them. Fill the nulls first, or use Spark 4.1 or newer"
        )
    return made


def _with_nulls(value: Any, kind: pa.DataType) -> Any:
    """A value with null in place of NaN, at any depth."""
    if pa.types.is_list(kind):
        return None if value is None else [_with_nulls(each, kind.value_type) for each in value]
    if isinstance(value, float | np.floating):
        if np.isnan(value):
            return None
        return int(value) if pa.types.is_integer(kind) else value
    return value


def _inferred(column: Any, *, skips_nan: bool) -> pa.Array:
    """A column of a type that only its values tell.

    Raises:
        DataError: it has a NaN, which may have been null.
    """
    if isinstance(column, pd.DataFrame):
        names = [str(name) for name in column.columns]
        if names == VECTOR_FIELDS:  # a dense one has a null size, and only a null one a null type
            null = column["type"].isnull().to_numpy()
            return _array(column, VECTOR_TYPE, null, np.zeros(len(column), bool))
        parts = [_inferred(column[name], skips_nan=skips_nan) for name in column.columns]
        return pa.StructArray.from_arrays(parts, names=names)
    values = pa.array(column.to_numpy())
    if _holds_nan(values) and not (skips_nan and _is_exact(values)):
        raise DataError(
            f"the model was called with NULL or NaN, which Spark {pyspark.__version__} does not "
            "tell apart in a function. Leave these rows out, or fill them: "
            "coalesce(nanvl(x, 0), 0). Or use transform, or Spark 4.1 or newer"
        )
    return values


def _holds_nan(values: pa.Array) -> bool:
    if isinstance(values, pa.StructArray):
        return any(map(_holds_nan, values.flatten()))
    if pa.types.is_list(values.type):
        return _holds_nan(values.flatten())
    return pa.types.is_floating(values.type) and bool(pc.any(pc.is_nan(values)).as_py())


def _is_exact(values: pa.Array) -> bool:
    """Whether numbers are sure to be what they were before a null beside them made them floats."""
    if pa.types.is_list(values.type):
        return _is_exact(values.flatten())
    numbers = values.to_numpy(zero_copy_only=False)
    return bool(np.nanmax(np.abs(numbers, dtype=float), initial=0) < EXACT)


def _as_table(structs: pa.StructArray, *, in_lists: bool = False) -> pd.DataFrame:
    """Structs as Spark takes them from a function of series.

    Args:
        structs: with fields of numbers, or of lists of numbers.
        in_lists: whether single numbers are to be in lists of one.
    """

    def series(values: pa.Array) -> pd.Series:
        if not in_lists or pa.types.is_list(values.type):
            return values.to_pandas()
        each = np.empty(len(values), object)
        each[:] = [None if one is None else [one] for one in values.to_pylist()]
        return pd.Series(each)

    parts = zip(structs.type, structs.flatten(), strict=True)
    return pd.DataFrame({field.name: series(values) for field, values in parts})
