"""Whole partitions grouped into as many as there are tasks, with a shuffle only where it must be.

``DataFrame.coalesce`` joins neighbours and never makes more partitions than there are. Here any
partitions may be grouped, some groups may be empty, and a plan whose partitions Spark decides only
while running is run as far as that takes. The rows of each group come in the order of its
partitions' numbers, and the grouping depends on those numbers and the sizes of files alone, never
on where blocks of rows happen to lie, nor on what a shuffle has written, which varies from run to
run: the same workers have the same rows in every run.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.errors import SparkDLError
from sparkdl.spark.catalyst.core import Py4JError, Py4JJavaError

MOST_SIZES = 256
"""The most partitions whose sizes are asked for, which takes about a millisecond each for files.
Spark numbers the partitions of files by size, so beyond this many the numbers say enough."""
MOST_FILES = 1_000
"""The most files whose sizes are asked for, which takes two messages to the JVM each."""
_KEY = "sparkdl_group"
"""A column by which rows are shuffled; none that is fed has such a name."""


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


def grouped(frame: DataFrame, groups: int, *, moved: bool = False) -> Grouped:
    """Put whole partitions together, or add empty ones.

    Runs the shuffles of an adaptive plan, as jobs of this thread.

    Args:
        frame: the rows.
        groups: the number of partitions to make.
        moved: whether a shuffle takes the partitions to their groups, as barrier mode needs it. The
            rows of a group then come in no particular order.

    Raises:
        NoGroupsError: Spark cannot do that.
    """
    try:
        return (_moved if moved else _grouped)(frame, groups)
    except Py4JJavaError:
        raise
    except Py4JError as error:
        raise NoGroupsError(str(error)) from error


def keys_of_partitions(partitions: int) -> list[int]:
    """For each partition, an ``int`` that ``DataFrame.repartition(partitions, key)`` sends there.

    Args:
        partitions: how many there are.
    """
    keys: dict[int, int] = {}
    for first in itertools.count(0, 16 * partitions):
        numbers = np.arange(first, first + 16 * partitions, dtype=np.int32)
        places, chosen = np.unique(_sparks_hash(numbers) % partitions, return_index=True)
        keys = dict(zip(places.tolist(), numbers[chosen].tolist(), strict=True)) | keys
        if len(keys) == partitions:
            break
    return [keys[number] for number in range(partitions)]


def _sparks_hash(numbers: np.ndarray) -> np.ndarray:
    """What SQL's ``hash`` makes of ints: MurmurHash3 (x86, 32 bits) with the seed 42."""

    def rotated(words: np.ndarray, bits: int) -> np.ndarray:
        found: np.ndarray = (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
        return found

    words = rotated(numbers.view(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    words = rotated(words ^ np.uint32(42), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    words ^= np.uint32(4)  # bytes
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> np.uint32(bits))) * np.uint32(factor)
    hashed: np.ndarray = words ^ (words >> np.uint32(16))
    return hashed.view(np.int32)


def _moved(frame: DataFrame, groups: int) -> Grouped:
    original = frame._jdf.queryExecution().toRdd()
    members = _members(frame.sparkSession, original, groups)
    keys = [0] * sum(map(len, members))
    for key, numbers in zip(keys_of_partitions(groups), members, strict=True):
        for number in numbers:
            keys[number] = key
    # One expression, as each literal of an array is a message to the JVM.
    listed = F.expr(f"array({', '.join(map(str, keys or [0]))})")
    rows = _frame_of(original, frame)
    rows = rows.withColumn(_KEY, listed[F.spark_partition_id()]).repartition(groups, _KEY)
    return Grouped(rows.drop(_KEY), tuple(map(tuple, members)), original)


def _grouped(frame: DataFrame, groups: int) -> Grouped:
    spark = frame.sparkSession
    context, jvm = spark.sparkContext, cast(Any, spark._jvm)
    original = frame._jdf.queryExecution().toRdd()
    partitions = original.getNumPartitions()
    members = _members(spark, original, groups)
    parts = [original]
    if partitions < groups:
        parts.append(context._jsc.parallelize([], groups - partitions).rdd())
    elif partitions > groups:
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


def _members(spark: SparkSession, rows: Any, groups: int) -> list[list[int]]:
    """The numbers of each group's partitions, by what is known about the cost of reading them."""
    partitions = rows.getNumPartitions()
    if partitions <= groups:
        return [[number] for number in range(partitions)] + [[]] * (groups - partitions)
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
