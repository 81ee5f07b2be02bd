"""What is known about a DataFrame's partitions without running anything."""

from __future__ import annotations

from pyspark.sql import DataFrame


def known_partitions(frame: DataFrame) -> int | None:
    """The number of partitions, or None if Spark only decides it while running.

    An adaptive plan is one that shuffles or reads a cached frame; asking for its partitions would
    run those stages.
    """
    execution = frame._jdf.queryExecution()
    if "AdaptiveSparkPlan" in execution.executedPlan().toString():
        return None
    return int(execution.toRdd().getNumPartitions())
