"""Whole partitions grouped into as many as there are tasks, without a shuffle.

``DataFrame.coalesce`` joins neighbours and never makes more partitions than there are. Here any
partitions may be grouped, some groups may be empty, and a plan whose partitions Spark decides only
while running is run as far as that takes. The rows of each group come in the order of its
partitions' numbers, and the grouping depends on those numbers and the sizes of files alone, never
on where blocks of rows happen to lie, nor on what a shuffle has written, which varies from run to
run: the same workers have the same rows in every run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.errors import SparkDLError

MOST_SIZES = 256
"""The most partitions whose sizes are asked for, which takes about a millisecond each for files.
Spark numbers the partitions of files by size, so beyond this many the numbers say enough."""
MOST_FILES = 1_000
"""The most files whose sizes are asked for, which takes two messages to the JVM each."""


@dataclass(frozen=True)
class Grouped:
    """Rows in grouped partitions.

    Attributes:
        frame: the same rows, in as many partitions as were asked for.
        members: the numbers of the original partitions in each group, in the order of their rows.
    """

    frame: DataFrame
    members: tuple[tuple[int, ...], ...]
    _original: Any

    def origin(self, group: int, row: int) -> tuple[int, int]:
        """Where a row was before: the number of its partition, and its position there.

        Counts the rows of the group's partitions, in a job of this thread.

        Args:
            group: counted from 0, as the row is.
            row: its position in the group.

        Raises:
            ValueError: there is no such row.
        """
        numbers = self.members[group]
        if len(numbers) > 1:
            spark = self.frame.sparkSession
            chosen = _pruned(self._original, numbers, spark)
            counted = _frame_of(chosen, self.frame).groupBy(F.spark_partition_id()).count()
            rows: dict[int, int] = dict(counted.collect())  # type: ignore[arg-type]
            for index, number in enumerate(numbers):
                if row < rows.get(index, 0):
                    return number, row
                row -= rows.get(index, 0)
        elif numbers:
            return numbers[0], row
        raise ValueError(f"partitions {numbers} have no such row")


class NoGroupsError(SparkDLError):
    """This Spark lacks a method that is needed to put partitions together."""


def grouped(frame: DataFrame, groups: int) -> Grouped:
    """Put whole partitions together, or add empty ones.

    Runs the shuffles of an adaptive plan, as jobs of this thread.

    Args:
        frame: the rows.
        groups: the number of partitions to make.

    Raises:
        NoGroupsError: Spark cannot do that.
    """
    try:
        return _grouped(frame, groups)
    except Py4JJavaError:
        raise
    except Py4JError as error:
        raise NoGroupsError(str(error)) from error


def _grouped(frame: DataFrame, groups: int) -> Grouped:
    spark = frame.sparkSession
    context, jvm = spark.sparkContext, cast(Any, spark._jvm)
    original = frame._jdf.queryExecution().toRdd()
    partitions = original.getNumPartitions()
    members = [[number] for number in range(partitions)] + [[]] * (groups - partitions)
    parts = [original]
    if partitions < groups:
        parts.append(context._jsc.parallelize([], groups - partitions).rdd())
    elif partitions > groups:
        members = _assigned(spark, original, partitions, groups)
        nothing = jvm.scala.Option.apply(None)
        parts = [
            _pruned(original, numbers, spark).coalesce(1, False, nothing, None)
            for numbers in members
        ]
    (rows, *others) = parts
    if others:
        rows = context._jsc.sc().union(jvm.PythonUtils.toSeq(parts), rows.elementClassTag())
    return Grouped(_frame_of(rows, frame), tuple(map(tuple, members)), original)


def _pruned(rows: Any, numbers: Sequence[int], spark: SparkSession) -> Any:
    """The partitions of an RDD that have these numbers."""
    jvm = cast(Any, spark._jvm)
    return jvm.org.apache.spark.rdd.PartitionPruningRDD.create(rows, _set_of(numbers, jvm))


def _frame_of(rows: Any, like: DataFrame) -> DataFrame:
    """An RDD of rows as a DataFrame with another's columns."""
    spark = like.sparkSession
    schema = like._jdf.schema()
    return DataFrame(spark._jsparkSession.internalCreateDataFrame(rows, schema, False), spark)


def balanced(sizes: Sequence[int], groups: int) -> list[list[int]]:
    """Assign numbers to groups of about the same size: the largest first, to the smallest group.

    Args:
        sizes: the size of each number, at least as many as there are groups.
        groups: the number of groups.

    Returns:
        The numbers of each group, ascending.
    """
    chosen: list[list[int]] = [[] for _ in range(groups)]
    # Among groups of the same size the one with the fewest comes first: empty ones get some too.
    smallest = [(0, 0, group) for group in range(groups)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size, count, group = heapq.heappop(smallest)
        chosen[group].append(number)
        heapq.heappush(smallest, (size + sizes[number], count + 1, group))
    return [sorted(numbers) for numbers in chosen]


def _assigned(spark: SparkSession, rows: Any, partitions: int, groups: int) -> list[list[int]]:
    """The numbers of each group's partitions, by what is known about the cost of reading them."""
    # Descending sizes pair up to equal sums: the first and the last go to one of two groups.
    by_number = balanced(range(2 * partitions, partitions, -1), groups)
    if partitions > MOST_SIZES:
        return by_number
    costs = _costs_of_files(rows, spark)
    return by_number if costs is None else balanced(costs, groups)


def _costs_of_files(rows: Any, spark: SparkSession) -> list[int] | None:
    """What reading each partition costs, as Spark estimates it; None if they are not of files.

    Spark has filled partitions of very many files to about the same size itself.
    """
    partitions = list(rows.partitions())
    if any(each.getClass().getSimpleName() != "FilePartition" for each in partitions):
        return None
    opening = int(spark._jsparkSession.sessionState().conf().filesOpenCostInBytes())
    files = [each.files() for each in partitions]
    if sum(map(len, files)) > MOST_FILES:
        return [0] * len(files)
    return [sum(opening + int(file.length()) for file in each) for each in files]


def _set_of(numbers: Sequence[int], jvm: Any) -> Any:
    """A set of numbers for the JVM, made in one call: each step of making one is a message."""
    chosen = np.zeros(max(numbers) + 1, bool)
    chosen[list(numbers)] = True
    words = jvm.java.util.BitSet.valueOf(np.packbits(chosen, bitorder="little").tobytes())
    sets = getattr(getattr(jvm.scala.collection.immutable, "BitSet$"), "MODULE$")
    return sets.fromBitMaskNoCopy(words.toLongArray())
