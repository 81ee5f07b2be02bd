"""A round in the classic Spark way: broadcast the parameters, treeReduce what the tasks return."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from pyspark import Broadcast
from pyspark.sql import SparkSession

_contributions: dict[tuple[int, int], np.ndarray] = {}
"""Kept in the Python workers from round to round: a real worker has its parameters at hand."""


class SparkRounds:
    """Rounds in one session.

    Args:
        spark: a session with a slot for each worker.
        workers: how many tasks contribute.
        numel: number of float32 parameters.
    """

    def __init__(self, spark: SparkSession, workers: int, numel: int) -> None:
        self._context = spark.sparkContext
        self._workers = workers
        self._center = np.zeros(numel, dtype=np.float32)

    def round(self) -> float:
        """Runs one round; returns its seconds."""
        start = time.perf_counter()
        broadcast = self._context.broadcast(self._center)
        slots = self._context.parallelize(range(self._workers), self._workers)
        total = slots.mapPartitionsWithIndex(_task(broadcast)).treeReduce(np.add)
        self._center = total / np.float32(self._workers)
        seconds = time.perf_counter() - start
        broadcast.unpersist()
        expected = (self._workers + 1) / 2
        if not (self._center == expected).all():
            raise RuntimeError(f"the average is {self._center}, not {expected}")
        return seconds


def _task(center: "Broadcast[np.ndarray]") -> Any:
    def contribute(rank: int, rows: Iterator[int]) -> Iterator[np.ndarray]:
        for _ in rows:  # a task that leaves its input unread costs a new Python process
            pass
        key = (rank, len(center.value))
        if key not in _contributions:
            _contributions[key] = np.full(len(center.value), rank + 1, dtype=np.float32)
        yield _contributions[key]

    return contribute
