"""A model as a function of columns, to be called in SQL and in expressions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql.pandas.functions import arrow_udf

from sparkdl.encodings import arriving_as
from sparkdl.errors import ConfigError, DataError
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.predictor import Predictor
from sparkdl.spark.inference.shared_model import OF_ANOTHER_SESSION

_SILENT = (
    pa.types.is_struct,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_null,
)
"""Arrow types that do not say how many numbers a row has."""


def predict_function(predictor: Predictor, features: Sequence[ColumnSpec]) -> Any:
    """A user-defined function of as many columns as the model has features.

    The batches themselves tell what a column holds, because a function is made before its columns
    are known.

    Args:
        predictor: what to do with the rows.
        features: the tensors that the model takes, as in training.

    Returns:
        A function for ``spark.udf.register``, which returns a Column when called with Columns. Its
        values are those of the only output, or structs of several by column name.
    """
    alone = len(predictor.outputs) == 1
    names = [each.name for each in predictor.outputs]

    def predict(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        def rows() -> Iterator[tuple[Sequence[pa.Array], Sequence[ColumnSpec]]]:
            for batch in batches:
                # Spark passes a bare array if there is only one column.
                given = batch if isinstance(batch, tuple) else (batch,)
                arrays = tuple(map(_without_decimals, given))
                if len(arrays) != len(features):
                    taken = ", ".join(each.name for each in features)
                    raise DataError(
                        f"the model was called with {len(arrays)} columns, but it takes "
                        f"{len(features)}: {taken}"
                    )
                yield arrays, list(map(_as_it_comes, features, arrays))

        for predicted in predictor.predictions(rows()):
            yield predicted[0] if alone else pa.StructArray.from_arrays(predicted, names=names)

    fields = [
        f"`{name.replace('`', '``')}` {sql}"
        for name, sql in zip(names, predictor.sql_types, strict=True)
    ]
    result = predictor.sql_types[0] if alone else f"struct<{', '.join(fields)}>"
    made: Any = arrow_udf(predict, result)  # type: ignore[call-overload]
    context = SparkContext._active_spark_context

    # It has every attribute of what it wraps, by which Spark registers a function.
    @functools.wraps(made)
    def function(*columns: Any) -> Any:
        if context is not SparkContext._active_spark_context:
            raise ConfigError(OF_ANOTHER_SESSION)
        return made(*columns)

    return function


def _without_decimals(rows: pa.Array) -> pa.Array:
    """Doubles for decimals, also in arrays; as texts first, which are rounded as Spark rounds."""

    def like(kind: pa.DataType, value: pa.DataType) -> pa.DataType:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return pa.list_(like(kind.value_type, value))
        return value if pa.types.is_decimal(kind) else kind

    if like(rows.type, pa.null()) == like(rows.type, pa.string()):
        return rows
    return rows.cast(like(rows.type, pa.string())).cast(like(rows.type, pa.float64()))


def _as_it_comes(spec: ColumnSpec, rows: pa.Array) -> ColumnSpec:
    """The same tensor, for rows that may arrive in another encoding.

    Raises:
        DataError: they cannot become it.
    """
    if spec.encoding.chosen:
        return spec
    kind = rows.type
    encoding = arriving_as(kind, likely=spec.encoding)
    value, arrays = kind, False
    while pa.types.is_list(value) or pa.types.is_large_list(value):
        value, arrays = value.value_type, True
    taken = "one number per row"
    if spec.is_array:
        taken = f"arrays of {spec.elements or ''} numbers".replace("  ", " ")
    called = f"the model was called with a column of {kind}, but '{spec.name}' takes {taken}"
    if encoding is None and pa.types.is_struct(kind):
        raise DataError(
            "the model was called with a column of structs "
            f"({', '.join(f.name for f in kind)}), which cannot become a tensor. Call it with "
            "the numeric fields"
        )
    if encoding is None:
        wanted = "ARRAY<DOUBLE>" if arrays else "DOUBLE"
        raise DataError(f"{called}. Cast it if it holds numbers: CAST(x AS {wanted})")
    # The contents of structs and bytes are checked when decoded, and nulls are refused as such.
    if not any(tells_nothing(value) for tells_nothing in _SILENT) and arrays != spec.is_array:
        raise DataError(f"{called}. Call it with {'array(x, ...)' if spec.is_array else 'x[0]'}")
    return replace(spec, encoding=encoding)
