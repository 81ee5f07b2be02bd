"""Predictions as columns of a DataFrame, or by a function of columns for SQL and expressions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.arguments import listed
from sparkdl.encodings import arriving_as
from sparkdl.errors import ConfigError, DataError
from sparkdl.feed.packed import unpacked
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.catalyst.jvm import running_context
from sparkdl.spark.inference.predictor import Predictor
from sparkdl.spark.inference.shared_model import OF_ANOTHER_SESSION
from sparkdl.spark.launch.environments import checked
from sparkdl.spark.rows.columns import InputColumn, require_exact
from sparkdl.spark.rows.packing import Source, packed_columns

_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


def hits_empty_batch_loop(spark: SparkSession) -> bool:
    """Whether a Python function of columns from a columnar file would never end.

    Spark 4.3.0 then makes batches of no rows for ever, where its documentation says that a number
    of 0 or less is no limit.

    Args:
        spark: the session that calls the function.
    """
    return int(spark.conf.get(_RECORDS) or 1) <= 0 and _passes_columns(spark)


def _passes_columns(spark: SparkSession) -> bool:
    """Whether Spark passes columns of columnar files to Python functions without making rows."""
    try:
        return (spark.conf.get(_COLUMNAR) or "").lower() == "true"
    except PySparkException:  # an older Spark
        return False


def require_end(spark: SparkSession) -> None:
    """Refuse to make a function that might never end, as it may be called with any columns.

    Args:
        spark: the session that is to call the function.

    Raises:
        ConfigError: it has such settings.
    """
    if hits_empty_batch_loop(spark):
        raise ConfigError(
            f"{_RECORDS} is {spark.conf.get(_RECORDS)}, with which Spark calls Python functions "
            f"on columnar files for ever. Set it to a number above 0, or {_COLUMNAR} to false"
        )


def readable(dataset: DataFrame, column: InputColumn) -> DataFrame:
    """The same rows, in a form that Spark can pass to a Python function.

    Spark 4.3 cannot pass columns of user-defined types, like pyspark.ml's vectors, from a columnar
    file to a Python function (UNSUPPORTED_DATATYPE), nor anything without a limit of rows. A filter
    turns them into rows first; it is left out where it is not needed, as Spark calls a Python
    function twice whose column it filters by.
    """
    if hits_empty_batch_loop(dataset.sparkSession):
        return dataset.where(F.spark_partition_id() >= 0)
    if '"type":"udt"' not in dataset.schema.json() or not _passes_columns(dataset.sparkSession):
        return dataset
    value = column.expression()
    return dataset.where(value.isNull() | value.isNotNull())


def prediction_columns(
    predictor: Predictor,
    dataset: DataFrame,
    columns: Sequence[InputColumn],
    specs: Sequence[ColumnSpec],
) -> dict[str, Column]:
    """The columns of predictions by name; the model runs once for all of them.

    Args:
        predictor: what to do with the rows.
        dataset: the DataFrame to add them to.
        columns: the feature columns, in the order of the model's arguments.
        specs: the tensors that they become.
    """
    # A Connect session's frame makes its schema anew each time.
    kinds = {field.name: field.dataType for field in dataset.schema}
    sources = [
        Source(f"c{index}", column.expression(), column.arriving(kinds))
        for index, column in enumerate(columns)
    ]
    inputs = packed_columns(sources, dataset.sparkSession)
    input_names = list(inputs)

    def predict(batches: Iterator[Arrays]) -> Iterator[pa.Array]:
        def rows() -> Iterator[tuple[Sequence[pa.Array], Sequence[ColumnSpec]]]:
            for arrays in batches:
                batch = pa.RecordBatch.from_arrays(list(arrays), names=input_names)
                yield unpacked(batch).columns, specs

        for predicted in predictor.predictions(rows()):
            yield pa.StructArray.from_arrays(predicted, names=predictor.fields)

    types = dict(zip(predictor.fields, predictor.sql_types, strict=True))
    predictions = called_on(dataset, inputs, predict, types)
    as_vectors = predictor.prediction.double

    def column(field: str, wide: bool) -> Column:
        values = predictions[field]
        if not (wide and as_vectors):
            return values
        # Spark's function fails on the nulls of rows that are left out.
        guarded = F.when(values.isNotNull(), array_to_vector(values))
        return guarded if predictor.skip_invalid else array_to_vector(values)

    named_fields = zip(predictor.fields, predictor.outputs, strict=True)
    return {each.name: column(field, each.wide) for field, each in named_fields}


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

    def predict(batches: Iterator[Arrays]) -> Iterator[pa.Array]:
        def rows() -> Iterator[tuple[Sequence[pa.Array], Sequence[ColumnSpec]]]:
            for given in batches:
                if len(given) != len(features):
                    taken = listed(each.name for each in features)
                    raise DataError(
                        f"the model was called with {len(given)} columns, but it takes "
                        f"{len(features)}: {taken}"
                    )
                arrays = tuple(map(_without_decimals, given, features))
                yield arrays, list(map(_as_it_comes, features, arrays))

        for predicted in predictor.predictions(rows()):
            yield predicted[0] if alone else pa.StructArray.from_arrays(predicted, names=names)

    fields = [
        f"`{name.replace('`', '``')}` {sql}"
        for name, sql in zip(names, predictor.sql_types, strict=True)
    ]
    result = predictor.sql_types[0] if alone else f"struct<{', '.join(fields)}>"
    made = function_of_columns(predict, result, skips_nan=predictor.skip_invalid)
    context = running_context()

    # It has every attribute of what it wraps, by which Spark registers a function.
    @functools.wraps(made)
    def function(*columns: Any) -> Any:
        if context is not running_context():
            raise ConfigError(OF_ANOTHER_SESSION)
        return made(*columns)

    return function


def _without_decimals(rows: pa.Array, spec: ColumnSpec) -> pa.Array:
    """Doubles for decimals, also in arrays; as texts first, which are rounded as Spark rounds."""

    def like(kind: pa.DataType, value: pa.DataType) -> pa.DataType:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return pa.list_(like(kind.value_type, value))
        if not pa.types.is_decimal(kind):
            return kind
        require_exact(spec.name, kind.precision - kind.scale, spec.dtype)
        return value

    if like(rows.type, pa.null()) == like(rows.type, pa.string()):
        return rows
    return rows.cast(like(rows.type, pa.string())).cast(like(rows.type, pa.float64()))


def _as_it_comes(spec: ColumnSpec, rows: pa.Array) -> ColumnSpec:
    """The same tensor, for rows that may arrive in another encoding.

    Raises:
        DataError: they cannot become it.
    """
    kind = rows.type
    encoding = arriving_as(kind, likely=spec.encoding)
    if spec.encoding.chosen and (encoding is None or spec.encoding.reads(encoding)):
        return spec
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


Arrays = tuple[pa.Array, ...]
Function = Callable[[Iterator[Arrays]], Iterator[pa.Array]]
"""From the columns of each batch to as many values, in batches of any size."""


def has_arrow_functions() -> bool:
    """Whether this Spark passes Arrow arrays."""
    return hasattr(F, "arrow_udf")


def called_on(
    frame: DataFrame, inputs: Mapping[str, Column], function: Function, fields: Mapping[str, str]
) -> dict[str, Column]:
    """Call a function on columns.

    Args:
        frame: the DataFrame of the columns.
        inputs: the function's arguments, by any names.
        function: returns structs of floats, doubles or arrays of these, null for all or none.
        fields: the SQL types of the structs' fields, by name.

    Returns:
        The fields as columns; the function runs once for all of them.
    """
    if not has_arrow_functions():
        # pandas takes a while to import, and nothing else here needs it.
        from sparkdl.spark.inference import pandas_functions

        return pandas_functions.called_on(frame, inputs, function, fields)
    structs = _arrow_udf(function, struct_of(fields))(*inputs.values())
    return {name: structs[name] for name in fields}


def function_of_columns(function: Function, result: str, *, skips_nan: bool) -> Any:
    """Make a function of any columns, for SQL and expressions.

    Args:
        function: takes them as they come.
        result: the SQL type of its values.
        skips_nan: whether the function treats NaN and null alike.
    """
    if has_arrow_functions():
        return _arrow_udf(function, result)
    from sparkdl.spark.inference import pandas_functions

    return pandas_functions.function_of_columns(function, result, skips_nan=skips_nan)


def _arrow_udf(function: Function, result: str) -> Any:
    def on_arrays(batches: Iterator[Any]) -> Iterator[pa.Array]:
        return function(map(columns_of, batches))

    # By this PySpark tells that batches come one after another, each of any number of columns.
    on_arrays.__annotations__ = {
        "batches": Iterator[tuple[pa.Array, ...]],
        "return": Iterator[pa.Array],
    }
    on_arrays.__name__ = function.__name__  # which names the column
    return F.arrow_udf(checked(on_arrays), result)  # type: ignore[attr-defined]


def columns_of(batch: Any) -> tuple[Any, ...]:
    """A batch's columns; Spark passes a bare one if there is only one."""
    return batch if isinstance(batch, tuple) else (batch,)


def struct_of(fields: Mapping[str, str]) -> str:
    """The SQL type of structs of these fields."""
    return f"struct<{', '.join(f'{name} {sql}' for name, sql in fields.items())}>"
