"""Whole partitions grouped into as many as there are tasks, without a shuffle.

``DataFrame.coalesce`` joins neighbours and never makes more partitions than there are. Here any
partitions may be grouped, some groups may be empty, and a plan whose partitions Spark decides only
while running is run as far as that takes. The rows of each group come in the order of its
partitions' numbers, and the grouping depends on sizes and those numbers alone, never on where
blocks of rows happen to lie: the same workers have the same rows in every run. What a shuffle has
written is compressed, and must be allowed to vary a little from run to run: sizes count only where
partitions are quite uneven, and then only roughly.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
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
UNEVEN = 1.25
"""How many times larger the largest group may be by numbers than by sizes, before sizes count."""
PARTS_OF_A_GROUP = 16
"""Sizes are rounded to a group's share divided by this."""
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
        members = _assigned(frame, original, partitions, groups)
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


def _assigned(frame: DataFrame, rows: Any, partitions: int, groups: int) -> list[list[int]]:
    """The numbers of each group's partitions, by what is known about the cost of reading them."""
    spark = frame.sparkSession
    # Descending sizes pair up to equal sums: the first and the last go to one of two groups.
    by_number = balanced(range(2 * partitions, partitions, -1), groups)
    if partitions > MOST_SIZES:
        return by_number
    costs = _costs_of_files(rows, spark)
    if costs is not None:
        return balanced(costs, groups)
    sizes = _sizes_of_shuffles(frame, rows, partitions)
    if sizes is None:
        return by_number
    unit = max(1, sum(sizes) // (groups * PARTS_OF_A_GROUP))
    by_size = balanced([round(size / unit) for size in sizes], groups)
    largest = [max(sum(sizes[k] for k in group) for group in way) for way in (by_number, by_size)]
    return by_size if largest[0] > UNEVEN * largest[1] else by_number


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


def _sizes_of_shuffles(frame: DataFrame, rows: Any, partitions: int) -> list[int] | None:
    """How many bytes finished shuffles have for each partition, for a join from both of its sides.

    None if some rows come from elsewhere.
    """
    shuffles = _shuffles_behind(rows, partitions)
    if shuffles is None:
        return None
    texts = cast(Any, frame.sparkSession._jvm).java.util.Arrays
    written = {
        statistics.shuffleId(): json.loads(texts.toString(statistics.bytesByPartitionId()))
        for statistics in _statistics(frame._jdf.queryExecution().executedPlan())
    }
    sizes = [0] * partitions
    for shuffle in shuffles:
        of_it = written.get(shuffle.dependency().shuffleId())
        if of_it is None:
            return None
        for number, partition in enumerate(shuffle.partitions()):
            size = _size_of(partition.spec(), of_it)
            if size is None:
                return None
            sizes[number] += size
    return sizes


def _size_of(spec: Any, written: Sequence[int]) -> int | None:
    """How many bytes a partition reads of a shuffle, by what each of its partitions has."""
    kind = spec.getClass().getSimpleName()
    if kind == "CoalescedPartitionSpec":
        return sum(written[spec.startReducerIndex() : spec.endReducerIndex()])
    return int(spec.dataSize()) if kind == "PartialReducerPartitionSpec" else None


def _statistics(plan: Any) -> Iterator[Any]:
    """Spark's statistics of the shuffles that the last stage of a plan reads."""
    leaves = plan.collectLeaves()
    for leaf in (leaves.apply(index) for index in range(leaves.size())):
        kind = leaf.getClass().getSimpleName()
        if kind == "AdaptiveSparkPlanExec":
            yield from _statistics(leaf.executedPlan())
        elif kind == "ResultQueryStageExec":  # around the last stage, since Spark 4
            yield from _statistics(leaf.plan())
        elif kind == "ShuffleQueryStageExec" and leaf.mapStats().isDefined():
            yield leaf.mapStats().get()


def _shuffles_behind(rows: Any, partitions: int) -> list[Any] | None:
    """The shuffles that an RDD reads partition by partition; None if it reads anything else."""
    if rows.getNumPartitions() != partitions:
        return None
    if rows.getClass().getSimpleName() == "ShuffledRowRDD":
        return [rows]
    parents, found = rows.dependencies(), []
    for index in range(parents.size()):
        parent = parents.apply(index)
        if parent.getClass().getSimpleName() != "OneToOneDependency":
            return None
        behind = _shuffles_behind(parent.rdd(), partitions)
        if behind is None:
            return None
        found += behind
    return found or None


def _set_of(numbers: Sequence[int], jvm: Any) -> Any:
    """A set of numbers for the JVM, made in one call: each step of making one is a message."""
    chosen = np.zeros(max(numbers) + 1, bool)
    chosen[list(numbers)] = True
    words = jvm.java.util.BitSet.valueOf(np.packbits(chosen, bitorder="little").tobytes())
    sets = getattr(getattr(jvm.scala.collection.immutable, "BitSet$"), "MODULE$")
    return sets.fromBitMaskNoCopy(words.toLongArray())
