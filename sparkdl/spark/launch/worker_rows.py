"""The rows of one fit as its workers receive them.

Each task reads whole partitions, several if there are more of them than tasks, and the workers
exchange the rows among themselves (``reshuffle``): each row is read once, and travels once, in its
final form. Spark's shuffle would write, read and sort it as a JVM row. It remains for what cannot
be done otherwise, and for those who want it. Each row brings its place in the user's DataFrame, by
which the exchange is planned: so it makes no difference which task has read which partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import pyarrow as pa
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from sparkdl.collective import Network
from sparkdl.errors import ConfigError
from sparkdl.feed.packed import ORDER_COLUMN, PLACE_COLUMN
from sparkdl.spark.catalyst.jvm import RDD, is_of_connect
from sparkdl.spark.catalyst.plans import has_stable_order, in_partitions, moved, planned
from sparkdl.spark.catalyst.versions import on_tasks
from sparkdl.spark.launch.assignment import OUTPUT_DDL
from sparkdl.spark.rows.columns import InputColumn, quoted
from sparkdl.spark.rows.packing import packed, small_record_batches

logger = logging.getLogger(__name__)

SHUFFLES = ("exchange", "spark", "none")
"""The values that ``shuffleRows`` may have."""

R = TypeVar("R")
Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What mapInArrow runs."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The Spark side of one fit or run.

    Attributes:
        frame: the user's DataFrame; with a partition for each task if no rows are fed.
        columns: the columns to feed, in the order of the job's schema; none for no rows.
        num_workers: ranks to run at the same time.
        shuffle: how the rows get to them, one of ``SHUFFLES``.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        description: shown in the Spark UI.
        network: how they reach each other.
        in_memory: what demands that their rows are never on a disk; None if nothing does.
        ranks_a_task: ranks per task; divides ``num_workers``.
        profile: what each task needs; None for what the session's settings say.
        ship_modules: whether the user's own modules are sent to them.
    """

    frame: DataFrame
    columns: tuple[InputColumn, ...]
    num_workers: int
    shuffle: str
    device: str
    description: str
    network: Network
    in_memory: str | None = None
    ranks_a_task: int = 1
    profile: ResourceProfile | None = None
    ship_modules: bool = True

    @property
    def num_tasks(self) -> int:
        """Tasks to run at the same time."""
        return self.num_workers // self.ranks_a_task

    @property
    def exchanged(self) -> bool:
        """Whether the workers exchange the rows among themselves before they train."""
        return self.shuffle == "exchange" and self.num_workers > 1

    @cached_property
    def planned(self) -> tuple[DataFrame, int | None]:
        """The columns to feed and each row's place, and the number of their partitions.

        They are the same if the workers are started again.
        """
        columns = [c.expression().alias(f"c{index}") for index, c in enumerate(self.columns)]
        place = F.monotonically_increasing_id().alias(PLACE_COLUMN)
        return planned(self.frame.select(*columns, place))


def worker_frame(workers: Workers) -> DataFrame:
    """The rows as workers receive them: only what is needed, packed, one partition per task.

    A shuffle delivers the same set of rows to a partition in every run, but in varying order.
    Spark would sort whole rows, so the workers sort them instead: by their place if that is the
    same in every run, else by partition and content, of which they compute a hash anyway. The ranks
    of a task share its rows before anything looks into them, so there it is a hash of Spark's.

    Args:
        workers: whose rows.

    Raises:
        ConfigError: they are to stay in their partitions, but cannot.
    """
    stable = has_stable_order(workers.frame)
    rows = packed(_on_tasks(workers, stable=stable))
    if workers.ranks_a_task == 1:
        return rows if stable else rows.select("*", F.lit(None).alias(ORDER_COLUMN))
    identity = [PLACE_COLUMN] if stable else [n for n in rows.columns if n != PLACE_COLUMN]
    return rows.select("*", F.xxhash64(*map(quoted, identity)).alias(ORDER_COLUMN))


def _on_tasks(workers: Workers, *, stable: bool) -> DataFrame:
    """The rows in one partition per task; ``stable`` are those whose places are in every run."""
    tasks, (rows, found) = workers.num_tasks, workers.planned
    after = "stay there"
    if workers.exchanged:
        after = f"are exchanged among {workers.num_workers} workers"
    if found == tasks and (workers.shuffle != "spark" or tasks == 1):
        logger.info("rows: %d partitions are read by as many tasks, and %s", tasks, after)
        return rows
    reason = f"{tasks} tasks read {found} partitions"
    if found is None:
        reason = "Spark Connect does not say how many partitions there are"
    if workers.shuffle == "none":
        why, instead = f"those cannot be read as they are: {reason}", "Drop shuffleRows"
        if found is not None:
            why = f"the DataFrame has {found} for {tasks} tasks"
            instead += f", or make as many partitions as tasks: df.repartition({tasks})"
        kept = "shuffleRows='none' leaves rows in their partitions"
        raise ConfigError(f"{kept}, but {why}. {instead}")
    if workers.shuffle == "spark":
        logger.info("rows: Spark's shuffle, because that was asked for")
        # By places that vary from run to run, Spark would send rows to other tasks.
        return (rows if stable else rows.drop(PLACE_COLUMN)).repartition(tasks)
    if found is None:
        what = f"takes whole partitions to {tasks} tasks, and they {after}"
        logger.info("rows: Spark's shuffle %s, because %s", what, reason)
        return moved(rows, tasks)
    logger.info("rows: %d partitions are read by %d tasks, and %s", found, tasks, after)
    return in_partitions(rows, tasks)


def run_tasks(workers: Workers, task: Task, read: Callable[[DataFrame | RDD[Row]], R]) -> R:
    """Run the tasks of workers; those of a Connect client have to meet.

    Args:
        workers: the Spark side of the run.
        task: what to run on each partition.
        read: reads what the tasks yield, ``OUTPUT_DDL``.

    Returns:
        What ``read`` returns.
    """
    spark = workers.frame.sparkSession
    frame = worker_frame(workers) if workers.columns else workers.frame
    barrier = is_of_connect(spark)
    with small_record_batches(spark, len(workers.columns)):
        return read(on_tasks(frame, task, OUTPUT_DDL, barrier=barrier, profile=workers.profile))
