"""The partitions of a DataFrame, and whether its rows always come in the same order."""

from __future__ import annotations

import re
from typing import Any, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.feed.packed import PLACE_COLUMN, POSITION_BITS
from sparkdl.spark.catalyst.jvm import is_of_connect, with_fallback

_ORDER_KEEPING = {"ColumnarToRow", "Project", "Filter", "Coalesce"}
"""Inner nodes that work row by row, or concatenate whole partitions."""
_NODE = re.compile(r"^[\s:+-]*(?:\*\(\d+\) |\* )?(\w+)", re.MULTILINE)
"""The name that each line of an explained plan begins with."""


def _counted(frame: DataFrame) -> tuple[DataFrame, int | None]:
    return frame, None if is_of_connect(frame) else frame.rdd.getNumPartitions()


@with_fallback(_counted)
def planned(frame: DataFrame) -> tuple[DataFrame, int | None]:
    """Settle a DataFrame's partitions, for whoever may read them again.

    A later plan of the same files may have others, since Spark cuts files by the executors that it
    has then. Of an adaptive plan, which shuffles or reads a cached frame, all but the last stage
    runs, in jobs of this thread.

    Args:
        frame: the rows.

    Returns:
        The same rows, and the number of their partitions: None for a client of Spark Connect, which
        is not told.
    """
    rows = frame._jdf.queryExecution().toRdd()
    return _frame_of(rows, frame), int(rows.getNumPartitions())


def moved(frame: DataFrame, partitions: int) -> DataFrame:
    """Have Spark's shuffle put whole partitions together.

    Args:
        frame: the rows, with ``PLACE_COLUMN``.
        partitions: how many to make.
    """
    keys = ", ".join(map(str, keys_of_partitions(frame.sparkSession, partitions)))
    number = f"shiftright({PLACE_COLUMN}, {POSITION_BITS}) % {partitions}"
    return frame.repartition(partitions, F.expr(f"array({keys})[{number}]"))


def keys_of_partitions(spark: SparkSession, partitions: int) -> list[int]:
    """For each partition, an ``int`` that ``DataFrame.repartition(partitions, key)`` sends there.

    Spark computes them while it plans, without a job. One that is not found only makes partitions
    unequal.
    """
    keys = "), (".join(map(str, range(20 * partitions)))
    found = spark.sql(f"SELECT pmod(hash(k), {partitions}), k FROM VALUES ({keys}) AS keys(k)")
    chosen: dict[int, int] = dict(found.collect())  # type: ignore[arg-type]
    return [chosen.get(number, 0) for number in range(partitions)]


@with_fallback(moved)
def in_partitions(frame: DataFrame, partitions: int) -> DataFrame:
    """Put whole partitions together, or add empty ones, without a shuffle.

    Args:
        frame: the rows, with ``PLACE_COLUMN``.
        partitions: how many to make.
    """
    context, jvm = frame.sparkSession.sparkContext, cast(Any, frame.sparkSession._jvm)
    rows = frame._jdf.queryExecution().toRdd()
    missing = partitions - rows.getNumPartitions()
    if missing > 0:
        parts = [rows, context._jsc.parallelize([], missing).rdd()]
        rows = context._jsc.sc().union(jvm.PythonUtils.toSeq(parts), rows.elementClassTag())
    else:
        rows = rows.coalesce(partitions, False, jvm.scala.Option.apply(None), None)
    return _frame_of(rows, frame)


def _frame_of(rows: Any, like: DataFrame) -> DataFrame:
    """An RDD of rows as a DataFrame with another's columns."""
    spark = like.sparkSession
    schema = like._jdf.schema()
    return DataFrame(spark._jsparkSession.internalCreateDataFrame(rows, schema, False), spark)


def _explained(frame: DataFrame) -> str:
    (row,) = frame.sparkSession.sql("EXPLAIN SELECT * FROM {rows}", rows=frame).collect()
    return str(row[0]).partition("\n")[2]


@with_fallback(_explained)
def _plan_of(frame: DataFrame) -> str:
    session = frame._jdf.sparkSession()
    if session.getActiveSession().isEmpty():
        # Spark 3.5.0 copies the plan of a cached frame here, which takes the thread's session.
        session.setActiveSession(session)
    return str(frame._jdf.queryExecution().executedPlan().toString())


def has_stable_order(frame: DataFrame) -> bool:
    """Whether the rows are sure to come in the same order in every run: read row by row from files.

    A plan with a shuffle or a cached frame in it has nodes of other kinds.
    """
    # A line that is not known, such as one in a literal, says no.
    (*inner, leaf) = _NODE.findall(_plan_of(frame).rstrip()) or [""]
    return leaf == "FileScan" and set(inner) <= _ORDER_KEEPING
