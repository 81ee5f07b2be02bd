"""Files read in as many partitions as there are tasks, by having Spark plan them again.

Spark puts files, or parts of them, into one partition up to a size given by its settings
(``FilePartition.getFilePartitions``: next fit, largest first). Another size makes another number
of partitions, and adds nothing to the plan that barrier mode would refuse. The size is searched
for in a clone of the user's session, whose settings only the scan reads: the user's own stay as
they are, and fits in several threads do not affect each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl.errors import SparkDLError
from sparkdl.spark.catalyst.core import Py4JError
from sparkdl.spark.catalyst.plans import has_stable_order
from sparkdl.spark.catalyst.versions import dataset_class

TRIES = 16
"""How many sizes are tried. Each try plans the rows again, in about 50 ms, or longer with tens of
thousands of files."""

TOLERANCE = 0.05
"""How much more than needed a partition may hold, as a fraction."""

_SETTINGS = "spark.sql.files."
_POSITION_BITS = 33
"""The low bits of ``monotonically_increasing_id``; the bits above them number the partition."""

Stretch = tuple[int, int, int]
"""Rows of a file that are read together: their partition, the first one's position, how many."""


class NotSplitError(SparkDLError):
    """The rows cannot be read in as many partitions as was asked for."""


@dataclass(frozen=True)
class Replanned:
    """Rows of files, planned into other partitions.

    Attributes:
        frame: the rows in their new partitions.
        original: the rows as the user's DataFrame has them.
    """

    frame: DataFrame
    original: DataFrame

    def origin(self, partition: int, row: int) -> tuple[int, int]:
        """Where a row is in the original: the number of its partition, and its position there.

        Counts the rows of both, in jobs of this thread; only the counts move.

        Args:
            partition: counted from 0, as the row is.
            row: its position in the partition.

        Raises:
            ValueError: there is no such row, or a file is read more than once.
        """
        before, now = self._stretches
        for path, stretches in now.items():
            in_file = 0
            for number, first, rows in stretches:
                if number == partition and first <= row < first + rows:
                    return _in_file(before[path], in_file + row - first)
                in_file += rows
        raise ValueError(f"partition {partition} has no row {row}")

    @cached_property
    def _stretches(self) -> tuple[dict[str, list[Stretch]], dict[str, list[Stretch]]]:
        return _stretches_of(self.original), _stretches_of(self.frame)


def replanned(frame: DataFrame, partitions: int) -> Replanned:
    """Plan a DataFrame that only reads files again, in a given number of partitions.

    Runs no job. Which rows end up together depends only on the files' sizes and that number.

    Args:
        frame: the rows.
        partitions: the number of partitions to make.

    Raises:
        NotSplitError: it reads something else, or no size makes that many.
    """
    if not has_stable_order(frame):
        raise NotSplitError("they do not come from files row by row")
    execution, jvm = frame._jdf.queryExecution(), cast(Any, frame.sparkSession._jvm)
    plan = execution.analyzed()
    if not plan.deterministic():
        raise NotSplitError("some of their values depend on the partitions (rand() and the like)")
    if not plan.subqueriesAll().isEmpty():
        raise NotSplitError("their plan has a subquery, which every attempt would run")
    try:
        # The optimizer inlines what a WITH clause has named.
        if plan.containsPattern(jvm.org.apache.spark.sql.catalyst.trees.TreePattern.CTE()):
            plan = execution.optimizedPlan()
        return _replanned(frame, plan, partitions)
    except (Py4JError, PySparkException) as error:
        # If something is wrong with the files themselves, the next reader will say so.
        reason = str(error).partition("\n")[0]
        raise NotSplitError(f"this Spark cannot plan them again: {reason}") from error


def _replanned(frame: DataFrame, plan: Any, partitions: int) -> Replanned:
    spark = frame.sparkSession
    relation = _relation_of(plan)
    session = spark._jsparkSession.cloneSession()
    settings = session.conf()
    settings.set(_SETTINGS + "openCostInBytes", "0")
    settings.set(_SETTINGS + "minPartitionNum", "1")
    settings.unset(_SETTINGS + "maxPartitionNum")
    again = _on(plan, relation, session, frame)
    datasets = dataset_class(spark._jvm)

    def planned(size: int) -> Any:
        settings.set(_SETTINGS + "maxPartitionBytes", str(size))
        return datasets.ofRows(spark._jsparkSession, again)

    @cache
    def tried(size: int) -> tuple[int, int]:
        return _partitions_and_bytes(planned(size).queryExecution())

    def share(total: int) -> int:
        return -(-max(1, total) // partitions)

    # A relation may report the bytes of more than is read; for a table in a catalog it reports
    # what the catalog was told, by default ``Long.MaxValue``.
    _, total = tried(share(int(relation.location().sizeInBytes())))
    # The smallest size that makes few enough partitions makes the most even ones.
    low, high = 0, max(1, total)
    size = first = share(total)  # no smaller one can do
    best, found = None, set()
    for _ in range(TRIES):
        count, _ = tried(size)
        found.add(count)
        if count > partitions:
            low = size
        else:
            high = size
            best = size if count == partitions else best
        if best is not None and (best == first or high - low <= TOLERANCE * high):
            break
        size = (low + high) // 2
        if low == first:  # many files need hardly more, and with them each try takes seconds
            size = min(size, first + math.ceil(TOLERANCE * first))
        if size == low:
            break
    if best is not None:
        return Replanned(DataFrame(planned(best), spark), frame)
    nearest = sorted(found, key=lambda count: abs(count - partitions))[:2]
    raise NotSplitError(
        f"Spark's splits of the files make {' or '.join(map(str, sorted(nearest)))} partitions"
    )


def _partitions_and_bytes(execution: Any) -> tuple[int, int]:
    """How many partitions a plan reads from files, and how many bytes they have."""
    partitions = int(execution.toRdd().getNumPartitions())
    scan = execution.executedPlan().collectLeaves().head()
    return partitions, int(scan.metrics().apply("filesSize").value())


def _relation_of(plan: Any) -> Any:
    """The relation that a plan reads, if there are only nodes with one child above it."""
    while (children := plan.children()).size() == 1:
        if plan.nodeName() == "Repartition":
            raise NotSplitError("their plan has a coalesce, which barrier mode refuses")
        plan = children.apply(0)
    if plan.getClass().getSimpleName() == "LogicalRelation":
        relation = plan.relation()
        # Exactly this class: a format's own subclass may not survive being copied.
        if relation.getClass().getSimpleName() == "HadoopFsRelation":
            return relation
    raise NotSplitError(f"they come from a {plan.nodeName()}, not from plain files")


def _on(plan: Any, relation: Any, session: Any, frame: DataFrame) -> Any:
    """A plan whose files are read with the settings of another session.

    Spark's own methods that replace children leave a node alone if old and new are equal, which
    the relations of two sessions are.
    """
    if plan.children().isEmpty():
        # In the JVM, the two argument lists of Scala's copy are one.
        return _with(
            plan,
            relation,
            relation.copy(
                relation.location(),
                relation.partitionSchema(),
                relation.dataSchema(),
                relation.bucketSpec(),
                relation.fileFormat(),
                relation.options(),
                session,
            ),
            frame,
        )
    child = plan.children().apply(0)
    return _with(plan, child, _on(child, relation, session, frame), frame)


def _with(node: Any, old: Any, new: Any, frame: DataFrame) -> Any:
    """A node of a plan with one of its arguments replaced."""
    context, jvm = frame.sparkSession.sparkContext, cast(Any, frame.sparkSession._jvm)
    count = node.productArity()
    arguments = cast(Any, context._gateway).new_array(jvm.java.lang.Object, count)
    for index in range(count):
        argument = node.productElement(index)
        arguments[index] = new if old.equals(argument) else argument
    return node.makeCopy(arguments)


def _stretches_of(frame: DataFrame) -> dict[str, list[Stretch]]:
    """The stretches of each file that are read together, in their order in the file."""
    counted = (
        frame.select(
            F.monotonically_increasing_id().alias("id"),
            F.input_file_name().alias("path"),
            F.expr("input_file_block_start()").alias("start"),
        )
        .groupBy("path", "start")
        .agg(F.min("id"), F.max("id"), F.count("id"))
        .collect()
    )
    stretches: dict[str, list[Stretch]] = {}
    for path, _, first, last, rows in sorted(counted, key=lambda row: row.start):
        if last - first + 1 != rows:
            raise ValueError(f"{path} is read more than once")
        partition, position = divmod(first, 1 << _POSITION_BITS)
        stretches.setdefault(path, []).append((partition, position, rows))
    return stretches


def _in_file(stretches: list[Stretch], row: int) -> tuple[int, int]:
    for partition, first, rows in stretches:
        if row < rows:
            return partition, first + row
        row -= rows
    raise ValueError(f"a file has no row {row} beyond its last")
