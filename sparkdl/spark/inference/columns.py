"""Predictions as columns of a DataFrame, whose rows arrive in few, large pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf

from sparkdl.errors import ConfigError
from sparkdl.feed.record_batches.parquet_rows import unpacked_rows
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.predictor import Predictor
from sparkdl.spark.rows.columns import InputColumn
from sparkdl.spark.rows.in_files import columns_in_files, places
from sparkdl.spark.rows.packing import Source, packed_columns

_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


def never_ends(spark: SparkSession) -> bool:
    """Whether a Python function of columns from a columnar file would never end.

    Spark 4.3.0 then makes batches of no rows for ever, where its documentation says that a number
    of 0 or less is no limit.

    Args:
        spark: the session that calls the function.
    """
    if int(spark.conf.get(_RECORDS) or 1) > 0:
        return False
    try:
        return (spark.conf.get(_COLUMNAR) or "").lower() == "true"
    except PySparkException:  # an older Spark, which passes rows only
        return False


def require_end(spark: SparkSession) -> None:
    """Refuse to make a function that might never end, as it may be called with any columns.

    Args:
        spark: the session that is to call the function.

    Raises:
        ConfigError: it has such settings.
    """
    if never_ends(spark):
        raise ConfigError(
            f"{_RECORDS} is {spark.conf.get(_RECORDS)}, with which Spark calls Python functions "
            f"on columnar files for ever. Set it to a number above 0, or {_COLUMNAR} to false"
        )


def readable(dataset: DataFrame, column: InputColumn) -> DataFrame:
    """The same rows, in a form that Spark can pass to a Python function.

    Spark 4.3 cannot pass columns of user-defined types, like pyspark.ml's vectors, from a columnar
    file to a Python function (UNSUPPORTED_DATATYPE), nor anything without a limit of rows. A filter
    turns them into rows first.

    Args:
        dataset: any DataFrame.
        column: one of its columns.
    """
    if never_ends(dataset.sparkSession):
        return dataset.where(F.spark_partition_id() >= 0)
    if '"type":"udt"' not in dataset.schema.json():
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
    named = {f"c{index}": column for index, column in enumerate(columns)}
    in_files = columns_in_files(dataset, {name: column.name for name, column in named.items()})
    sources = [
        Source(name, column.expression(), column.arriving(dataset.schema))
        for name, column in named.items()
        if name not in in_files
    ]
    inputs = packed_columns(sources, dataset.sparkSession)
    if in_files:
        name, where = places(dataset, in_files)
        inputs[name] = where
    input_names = list(inputs)

    def predict(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        def whole() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                # Spark passes a bare array if there is only one column.
                arrays = batch if isinstance(batch, tuple) else (batch,)
                yield pa.RecordBatch.from_arrays(list(arrays), names=input_names)

        rows = ((batch.columns, specs) for batch in unpacked_rows(whole()))
        for predicted in predictor.predictions(rows):
            yield pa.StructArray.from_arrays(predicted, names=predictor.fields)

    types = [
        f"{field} {sql}" for field, sql in zip(predictor.fields, predictor.sql_types, strict=True)
    ]
    # The stubs know iterators of one array, or of tuples, but not both in one function.
    udf = arrow_udf(predict, f"struct<{', '.join(types)}>")  # type: ignore[call-overload]
    predictions = udf(*inputs.values())
    as_vectors = predictor.manner.double
    return {
        each.name: (
            array_to_vector(predictions[field]) if each.wide and as_vectors else predictions[field]
        )
        for field, each in zip(predictor.fields, predictor.outputs, strict=True)
    }
