"""The rows of one fit as its workers receive them, and where a bad row came from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from sparkdl.collective import Network
from sparkdl.feed.record_batches.packed import ORDER_COLUMN
from sparkdl.feed.statistics.column import names_places, with_places
from sparkdl.spark.catalyst.file_splits import NotSplitError, Replanned, replanned
from sparkdl.spark.catalyst.groups import Grouped, NoGroupsError, grouped
from sparkdl.spark.catalyst.jvm import is_of_connect
from sparkdl.spark.catalyst.plans import has_stable_order, known_partitions
from sparkdl.spark.catalyst.versions import on_tasks
from sparkdl.spark.cluster.gpus import gpu_profile
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.rows.columns import InputColumn, quoted
from sparkdl.spark.rows.delivery import Delivery, Way, delivery_of, require_one_each
from sparkdl.spark.rows.packing import packed, small_record_batches

logger = logging.getLogger(__name__)

COUNT_S = 60.0
"""Seconds allowed for finding out in which of Spark's partitions a bad row is."""

_FORBIDDEN_LINEAGE = "Barrier execution mode does not allow the following pattern of RDD chain"
"""Spark's wording of this error, in every version that has barrier stages."""


R = TypeVar("R")
Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What mapInArrow runs."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The Spark side of one fit.

    Attributes:
        frame: the user's DataFrame.
        columns: the columns to feed, in the order of the job's schema.
        num_workers: ranks to run at the same time.
        delivery: how the rows get to them.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        description: shown in the Spark UI.
        network: how they reach each other.
        store_in: where they keep their rows: ``disk`` or ``memory``.
        ranks_a_task: ranks per task; divides ``num_workers``.
        ship_modules: whether the user's own modules are sent to them.
        replanned: how the user's rows were planned again into the partitions of ``frame``, if so.
    """

    frame: DataFrame
    columns: tuple[InputColumn, ...]
    num_workers: int
    delivery: Delivery
    device: str
    description: str
    network: Network
    store_in: str = "disk"
    ranks_a_task: int = 1
    ship_modules: bool = True
    replanned: Replanned | None = None

    @property
    def num_tasks(self) -> int:
        """Tasks to run at the same time."""
        return self.num_workers // self.ranks_a_task


def delivered(
    frame: DataFrame, tasks: int, ranks_a_task: int, wish: str, gang_start_for: str | None
) -> tuple[Delivery, Replanned | None]:
    """Choose how a DataFrame's rows travel, planning files again into as many partitions as tasks.

    Barrier mode allows these, where it would need a shuffle instead of grouped partitions. Plans,
    but runs no job.

    Args:
        frame: the rows.
        tasks: the number of tasks that will read them.
        ranks_a_task: ranks per task.
        wish: one of ``SHUFFLES``.
        gang_start_for: what needs a gang-scheduled start; None if nothing does.

    Returns:
        How they travel, and what to read instead of ``frame``, if anything.

    Raises:
        ConfigError: the rows are to stay where they are, but cannot.
    """
    delivery = delivery_of(known_partitions(frame), tasks, ranks_a_task, wish, gang_start_for)
    if is_of_connect(frame):
        untold = "Spark Connect does not say how many partitions there are"
        return replace(delivery.shuffled(untold), way=Way.SHUFFLED, exchanged=False), None
    if delivery.way is Way.AS_IT_IS or wish != "exchange":
        return delivery, None
    try:
        again = replanned(frame, tasks)
    except NotSplitError as error:
        reason = delivery.reason and f"{delivery.reason}; {error}"
        return replace(delivery, reason=reason), None
    return delivery_of(tasks, tasks, ranks_a_task, wish, gang_start_for), again


def worker_frame(workers: Workers, seed: int, *, barrier: bool = False) -> DataFrame:
    """The rows as workers receive them: only what is needed, packed, one partition per task.

    A shuffle delivers the same set of rows to a partition in every run, but in varying order.
    Spark would sort whole rows, so the workers sort them instead: by where a row was before our
    shuffle if that is the same in every run, else by its content, of which they compute a hash
    anyway. Rows that go straight from files to the workers need neither.

    Args:
        workers: whose rows.
        seed: determines the rows' order.
        barrier: whether the tasks need a gang-scheduled start.

    Raises:
        ConfigError: they do, but the partitions, which are to stay as they are, differ in number.
    """
    rows = _with_order(workers, seed)
    if workers.delivery.way is Way.SHUFFLED:
        logger.info("rows: Spark's shuffle, because %s", workers.delivery.reason)
        return rows
    try:
        return _whole_partitions(rows, workers, barrier=barrier)
    except NoGroupsError as error:
        return worker_frame(_without_groups(workers, error), seed)


def _with_order(workers: Workers, seed: int) -> DataFrame:
    """The rows as workers receive them, except that their partitions may differ.

    Moved partitions are put in the order in which they would have been read. The ranks of a task
    share its rows by their order, so there it is the same, a hash, whatever the way.
    """

    def order(*identity: Column) -> Column:
        return F.xxhash64(F.lit(seed), *identity).alias(ORDER_COLUMN)

    columns = {f"c{index}": column for index, column in enumerate(workers.columns)}
    stable = has_stable_order(workers.frame)
    way, one_each = workers.delivery.way, workers.ranks_a_task == 1
    shuffled = way is Way.SHUFFLED
    rows = workers.frame.select(*[c.expression().alias(name) for name, c in columns.items()])
    if stable:
        place = F.monotonically_increasing_id()
        if shuffled or not (one_each or workers.delivery.stays):
            rows = rows.select("*", order(place))
        elif way is Way.MOVED:
            rows = rows.select("*", place.alias(ORDER_COLUMN))
    if shuffled:
        rows = rows.repartition(workers.num_tasks)
    rows = packed(rows)
    if stable:
        return rows
    if one_each:
        return rows.select("*", F.lit(None).alias(ORDER_COLUMN))
    # The code that assigns rows to ranks does not look into them.
    return rows.select("*", order(*[quoted(name) for name in rows.columns]))


def names_others(message: str, workers: Workers) -> bool:
    """Whether a message names places other than those in the partitions that Spark has read."""
    others = workers.delivery.way is Way.GROUPED or (
        workers.delivery.way is Way.AS_IT_IS and workers.replanned is not None
    )
    return others and workers.ranks_a_task == 1 and names_places(message)


def with_original_places(message: str, workers: Workers, seed: int, jobs: RunJobs) -> str:
    """A message about rows, with their places in the partitions that Spark has read.

    A worker whose task reads several partitions, one after another, knows only the position in
    all of them. So their rows are counted, once the workers have left and slots are free again.

    Args:
        message: the message, with places as the workers know them.
        workers: whose rows.
        seed: determines the rows' order.
        jobs: runs the Spark job that counts them.
    """
    translated: list[str] = []

    @cache
    def found() -> Grouped | Replanned:
        return workers.replanned or grouped(_with_order(workers, seed), workers.num_tasks)

    def translate() -> None:
        translated.append(with_places(message, lambda place: found().origin(*place)))

    def failed(error: Exception) -> None:  # the message matters more than its places
        logger.warning("could not look for bad rows", exc_info=error)

    try:
        jobs.start(translate, failed)
        jobs.wait(COUNT_S)
    finally:
        jobs.cancel()
    if translated:
        return translated[0]
    return (
        f"{message} (partition n stands for all partitions that task n read, in order: their "
        f"rows could not be counted, or not within {COUNT_S:g} s)"
    )


def _whole_partitions(rows: DataFrame, workers: Workers, *, barrier: bool) -> DataFrame:
    """As many partitions as tasks, each made of whole partitions."""
    tasks, exchanged, way = workers.num_tasks, workers.delivery.exchanged, workers.delivery.way
    after = f"and exchanged among {workers.num_workers} workers" if exchanged else "and stay there"
    if way is Way.AS_IT_IS:
        again = "" if workers.replanned is None else ", planned again,"
        logger.info("rows: %d partitions%s are read by as many tasks, %s", tasks, again, after)
        return rows
    found = grouped(rows, tasks, moved=way is Way.MOVED)
    sizes = list(map(len, found.members))
    if barrier and way is Way.GROUPED:
        require_one_each(sum(sizes), tasks)
    fewest, most = min(sizes), max(sizes)
    each = f"{fewest if fewest == most else f'{fewest} to {most}'} each, {after}"
    if way is Way.GROUPED:
        logger.info("rows: %d partitions are read by %d tasks, %s", sum(sizes), tasks, each)
    else:
        logger.info(
            "rows: Spark's shuffle takes %d partitions to %d tasks, %s, because %s",
            sum(sizes),
            tasks,
            each,
            workers.delivery.reason,
        )
    return found.frame


def _without_groups(workers: Workers, error: NoGroupsError) -> Workers:
    """What to run on a Spark that cannot put partitions together."""
    frame, delivery = workers.frame, workers.delivery
    partitions = known_partitions(frame) if delivery.way is Way.GROUPED else None
    if partitions is not None and partitions >= workers.num_tasks:
        frame = frame.coalesce(workers.num_tasks)
        return replace(workers, frame=frame, delivery=replace(delivery, way=Way.AS_IT_IS))
    reason = f"this Spark cannot combine partitions: {error}"
    return replace(workers, delivery=delivery.shuffled(reason))


def run_on_rows(
    workers: Workers, seed: int, task: Task, output: str, *, barrier: bool
) -> list[Row]:
    """Run the tasks, after a shuffle if barrier mode refuses what is upstream in their stage.

    Args:
        workers: whose rows, and how many tasks.
        seed: determines the rows' order.
        task: what to run on each partition.
        output: the schema of what it yields, as DDL.
        barrier: whether they need a gang-scheduled start.

    Returns:
        What the tasks yielded.
    """

    def run_on(rows: DataFrame) -> list[Row]:
        spark = rows.sparkSession
        profile = gpu_profile(spark, workers.device)
        with small_record_batches(spark):
            return on_tasks(rows, task, output, barrier=barrier, profile=profile).collect()

    return on_rows(workers, seed, run_on, barrier=barrier)


def on_rows(workers: Workers, seed: int, run_on: Callable[[DataFrame], R], *, barrier: bool) -> R:
    """Do something with the workers' rows, again after a shuffle if barrier mode refuses.

    Args:
        workers: whose rows, and how many tasks.
        seed: determines the rows' order.
        run_on: runs the tasks on the rows.
        barrier: whether they need a gang-scheduled start.

    Returns:
        What ``run_on`` returns.
    """
    try:
        return run_on(worker_frame(workers, seed, barrier=barrier))
    except Exception as error:
        if _FORBIDDEN_LINEAGE not in str(error):
            raise
    refused = workers.delivery.shuffled(_FORBIDDEN_LINEAGE)
    return run_on(worker_frame(replace(workers, delivery=refused), seed))
