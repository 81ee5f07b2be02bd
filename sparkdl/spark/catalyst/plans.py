"""What is known about a DataFrame's partitions without running anything."""

from __future__ import annotations

import re
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.spark.catalyst.jvm import is_of_connect, with_fallback

_ORDERED_SOURCE = "FileSourceScan"
"""The leaf of a physical plan that reads files, always in the same order."""
_ORDER_KEEPING = {
    "WholeStageCodegen",
    "InputAdapter",
    "ColumnarToRow",
    "Project",
    "Filter",
    "Coalesce",
}
"""Inner nodes that work row by row, or concatenate whole partitions."""
_NODE = re.compile(r"^[\s:+-]*(?:\*\(\d+\) |\* )?(\w+)", re.MULTILINE)
"""The name that each line of an explained plan begins with."""


def known_partitions(frame: DataFrame) -> int | None:
    """The number of partitions, or None if Spark decides it only while running.

    A client of Spark Connect is not told.

    An adaptive plan is one that shuffles or reads a cached frame; asking for its partitions would
    run those stages.
    """
    if is_of_connect(frame) or "AdaptiveSparkPlan" in _plan_text(frame):
        return None
    return _partitions(frame)


def _explained(frame: DataFrame) -> str:
    """What ``EXPLAIN`` says, below its heading."""
    (row,) = frame.sparkSession.sql("EXPLAIN SELECT * FROM {rows}", rows=frame).collect()
    return str(row[0]).partition("\n")[2].rstrip()


@with_fallback(_explained)
def _plan_text(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def _partitions_of_rdd(frame: DataFrame) -> int:
    return frame.rdd.getNumPartitions()


@with_fallback(_partitions_of_rdd)
def _partitions(frame: DataFrame) -> int:
    return int(frame._jdf.queryExecution().toRdd().getNumPartitions())


def _is_ordered_as_explained(frame: DataFrame) -> bool:
    """The same from text: a line that is not known, such as one in a literal, says no."""
    (*inner, leaf) = _NODE.findall(_explained(frame)) or [""]
    return leaf == "FileScan" and set(inner) <= _ORDER_KEEPING


@with_fallback(_is_ordered_as_explained)
def has_stable_order(frame: DataFrame) -> bool:
    """Whether the rows are sure to come in the same order in every run: read row by row from files.

    A plan with a shuffle or a cached frame in it has nodes of other kinds.
    """
    return _is_ordered(frame._jdf.queryExecution().executedPlan())


def _is_ordered(plan: Any) -> bool:
    name = plan.getClass().getSimpleName().removesuffix("Exec")
    children = plan.children()
    if children.isEmpty():
        return bool(name == _ORDERED_SOURCE)
    inner = [children.apply(index) for index in range(children.size())]
    return name in _ORDER_KEEPING and all(map(_is_ordered, inner))
