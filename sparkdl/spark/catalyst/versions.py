"""What the supported versions of Spark have in different places, or lack.

Whether a version has something is asked of the thing itself: vendors bring features to older ones.
pyspark.ml tells no stage the grid of the search that it is fitted for.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.ml.param import Param
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import types as T

from sparkdl.spark.catalyst.jvm import RDD

HAS_PROFILES = "profile" in inspect.signature(DataFrame.mapInArrow).parameters
"""Whether ``mapInArrow`` takes a resource profile: Spark 4.0 and newer."""


def on_tasks(
    frame: DataFrame,
    task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    output: str,
    *,
    barrier: bool,
    profile: ResourceProfile | None,
) -> DataFrame | RDD[Row]:
    """What a task yields for each partition.

    Args:
        frame: the rows.
        task: what ``mapInArrow`` is to run.
        output: the schema of what it yields, as DDL.
        barrier: whether the tasks have to meet, as in Spark's barrier mode.
        profile: what each task needs; what the session's settings say by default.
    """
    if profile is None:
        return frame.mapInArrow(task, output, barrier=barrier)
    if HAS_PROFILES:
        return frame.mapInArrow(task, output, barrier=barrier, profile=profile)
    # All of a stage has the one profile that any of it has.
    return frame.mapInArrow(task, output, barrier=barrier).rdd.withResources(profile)


def arrow_type(kind: T.DataType) -> pa.DataType:
    """The type as which Spark passes a column to Python."""
    from pyspark.sql.pandas.types import to_arrow_type

    return to_arrow_type(kind)


def table_of(frame: DataFrame) -> pa.Table:
    """The rows of a DataFrame, in the driver."""
    if hasattr(frame, "toArrow"):  # Spark 4.0 and newer
        return frame.toArrow()
    from pyspark.sql.pandas.types import to_arrow_schema

    older: Any = frame  # without types
    batches = older._collect_as_arrow()
    return pa.Table.from_batches(batches, None if batches else to_arrow_schema(frame.schema))


def frame_of(spark: SparkSession, table: pa.Table) -> DataFrame:
    """The rows of a table as a DataFrame."""
    from pyspark.sql.pandas.types import from_arrow_schema

    # By itself, Spark takes timestamps without a time zone for ones in the session's.
    schema = from_arrow_schema(table.schema, prefer_timestamp_ntz=True)
    # Spark 3 would go by pandas, where integers beside null become floats.
    return spark.createDataFrame(table.to_pylist() if of_spark_3() else table, schema)


def of_spark_3() -> bool:
    """Whether this is Spark 3, whose classes were not yet split for Spark Connect."""
    return pyspark.__version__.startswith("3.")


def column_bridge(jvm: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Functions from a column of the JVM's to its expression, and back."""
    sql = jvm.org.apache.spark.sql
    if of_spark_3():
        return (lambda column: column.expr()), sql.Column
    return sql.classic.ExpressionUtils.expression, sql.classic.ExpressionUtils.column


def searched_grid() -> Sequence[dict[Param[Any], Any]]:
    """All settings that a ``CrossValidator`` or ``TrainValidationSplit`` is going to try.

    Returns:
        The settings of the one that the caller is called by, also by way of a ``Pipeline``; none
        elsewhere, or if this Spark calls them otherwise.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "pyspark.ml.tuning" and "epm" in frame.f_locals:
            found: Sequence[dict[Param[Any], Any]] = frame.f_locals["epm"]
            return found
    return ()
