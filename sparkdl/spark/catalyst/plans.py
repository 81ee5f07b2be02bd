"""What is known about a DataFrame's partitions without running anything."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame


def known_partitions(frame: DataFrame) -> int | None:
    """The number of partitions, or None if Spark decides it only while running.

    An adaptive plan is one that shuffles or reads a cached frame; asking for its partitions would
    run those stages.
    """
    execution = frame._jdf.queryExecution()
    if "AdaptiveSparkPlan" in execution.executedPlan().toString():
        return None
    return int(execution.toRdd().getNumPartitions())


_ORDERED_SOURCE = "FileSourceScanExec"
"""The leaf of a physical plan that reads files, always in the same order."""
_ORDER_KEEPING = {
    "WholeStageCodegenExec",
    "InputAdapter",
    "ColumnarToRowExec",
    "ProjectExec",
    "FilterExec",
    "CoalesceExec",
}
"""Inner nodes that work row by row, or concatenate whole partitions."""


def has_stable_order(frame: DataFrame) -> bool:
    """Whether the rows are sure to come in the same order in every run: read row by row from files.

    A plan with a shuffle or a cached frame in it has nodes of other kinds.
    """
    return _is_ordered(frame._jdf.queryExecution().executedPlan())


def _is_ordered(plan: Any) -> bool:
    name, children = plan.getClass().getSimpleName(), plan.children()
    if children.isEmpty():
        return bool(name == _ORDERED_SOURCE)
    inner = [children.apply(index) for index in range(children.size())]
    return name in _ORDER_KEEPING and all(map(_is_ordered, inner))
