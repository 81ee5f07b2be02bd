"""Run the workers of one fit as one Spark job, in the background of the driver's rounds."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import cloudpickle
import pyarrow as pa
import torch
from pyspark import cloudpickle as spark_cloudpickle
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from sparkdl.averager.server import Averager
from sparkdl.collective import Network
from sparkdl.driver import Launch
from sparkdl.errors import (
    DataError,
    DisconnectedError,
    SetupError,
    SparkDLError,
    TrainingError,
    WorkerLostError,
)
from sparkdl.feed.facts import NO_ROWS
from sparkdl.feed.packed import ORDER_COLUMN
from sparkdl.spark.cluster.gpus import gpu_profile
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.cluster.slots import require_free_slots
from sparkdl.spark.diagnostics.board import BoardAddress
from sparkdl.spark.diagnostics.console import Console, driver_hosts, echoes
from sparkdl.spark.diagnostics.lost import is_loss, memory_advice, with_sparks_reason
from sparkdl.spark.diagnostics.watchdog import watched
from sparkdl.spark.launch import bootstrap
from sparkdl.spark.launch.task import OUTPUT_DDL
from sparkdl.spark.rows.columns import InputColumn, quoted
from sparkdl.spark.rows.packing import packed
from sparkdl.spark.rows.partitions import has_stable_order
from sparkdl.spark.rows.record_batches import small_record_batches
from sparkdl.spark.session.encryption import keeps_rows_in_memory
from sparkdl.version import __version__
from sparkdl.worker import Job

logger = logging.getLogger(__name__)

LEAVE_S = 2.0
"""Seconds that workers have to leave by themselves after a failure, before they are killed."""
JOB_END_S = 30.0
"""Seconds to wait for the Spark job to end once every worker has finished or was cancelled."""

_FORBIDDEN_LINEAGE = "Barrier execution mode does not allow the following pattern of RDD chain"
"""How Spark words it, in every version that has barrier stages."""

_NEEDED_BY_PYSPARK = re.compile(
    r"No module named '(?:pyarrow|pandas|numpy)'|(?:PyArrow|Pandas) >= [\d.]+ must be installed"
)
"""Missing before our own code could look."""

_UNREACHABLE = re.compile(
    rf"{DisconnectedError.__module__}\.{DisconnectedError.__qualname__}: (rank \d+ cannot reach .*)"
)
"""How a task ends that could never tell the driver of itself."""

# Functions of that module must run on executors that cannot import it.
spark_cloudpickle.register_pickle_by_value(bootstrap)  # type: ignore[no-untyped-call]


Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What mapInArrow runs."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The Spark side of one fit.

    Attributes:
        frame: the user's DataFrame.
        columns: the columns to feed, in the order of the job's schema.
        num_workers: ranks to run at once.
        repartition: whether the rows have to be spread anew.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        description: shown in the Spark UI.
        network: how they reach each other.
        store_in: where they keep their rows: ``disk`` or ``memory``.
        ranks_a_task: how many of them each task is; divides ``num_workers``.
    """

    frame: DataFrame
    columns: tuple[InputColumn, ...]
    num_workers: int
    repartition: bool
    device: str
    description: str
    network: Network
    store_in: str = "disk"
    ranks_a_task: int = 1

    @property
    def num_tasks(self) -> int:
        """Tasks to run at once."""
        return self.num_workers // self.ranks_a_task


def launch(workers: Workers, job: Job) -> Launch:
    """Prepare to start ``job`` on ``workers``; see ``driver.Launch``."""
    spark = workers.frame.sparkSession
    context = spark.sparkContext
    jobs = RunJobs(context, workers.description)
    barrier = job.strategy.needs.gang_start
    payload = cloudpickle.dumps(
        (job, workers.network, keeps_rows_in_memory(spark, workers.store_in))
    )

    @contextmanager
    def start(averager: Averager) -> Iterator[None]:
        with (
            Console(*driver_hosts(spark), tls=job.tls) as console,
            run_workers(averager, console.address),
            watched(averager, console.stacks, context, jobs, workers.num_tasks),
        ):
            yield

    @contextmanager
    def run_workers(averager: Averager, console: BoardAddress) -> Iterator[None]:
        arguments = (
            payload,
            astuple(averager.address),
            workers.device,
            astuple(console),
            echoes(spark),
        )
        task = rank_task(
            "sparkdl.spark.launch.task:run_worker_task", arguments, workers.ranks_a_task
        )
        if barrier:
            profile = gpu_profile(spark, workers.device)
            require_free_slots(spark, workers.num_tasks, profile, workers.ranks_a_task)

        def run_job() -> None:
            try:
                if not run_on_rows(workers, job.seed, task, OUTPUT_DDL, barrier=barrier):
                    # Spark starts no task for what it finds to be empty while it plans or shuffles.
                    averager.fail(DataError(NO_ROWS))
                # Dropped if every worker has finished, as it should be.
                averager.fail(
                    TrainingError(
                        "the Spark job ended before training did: a worker left without a word, "
                        f"perhaps because it could not reach the driver at {averager.address.uri}"
                    )
                )
            except Exception as error:  # whatever ends the Spark job ends the run
                averager.fail(as_training_error(error))

        thread = jobs.start(run_job)
        try:
            yield
        except SparkDLError as error:
            # Workers that wait for a round learn of the failure and leave by themselves; killing
            # them would cost the session its warm Python processes.
            thread.join(LEAVE_S)
            if isinstance(error, WorkerLostError):
                known = with_sparks_reason(error, spark, jobs.group, workers.ranks_a_task)
                if known is not None:
                    raise known from error
            raise
        except BaseException:
            jobs.cancel()
            raise
        else:
            thread.join(JOB_END_S)
        finally:
            if thread.is_alive():
                jobs.cancel()
                thread.join(JOB_END_S)
            if thread.is_alive():
                logger.warning("Spark jobs with tag %s did not end in %.0f s", jobs.tag, JOB_END_S)

    return start


def rank_task(
    entry: str, arguments: tuple[Any, ...], ranks_a_task: int, *, apart: bool = False
) -> Task:
    """The task that runs a worker's function for each of its ranks.

    Args:
        entry: ``module:function``; see ``assignment.run_ranks``.
        arguments: plain values.
        ranks_a_task: how many ranks each task is.
        apart: whether a rank that is alone in its task gets a process of its own too.
    """
    # A plain str: torch's own kind cannot be unpickled where torch is missing.
    versions = {"torch": str(torch.__version__)}
    return bootstrap.make_task(
        "sparkdl.spark.launch.assignment:run_ranks",
        (entry, arguments, ranks_a_task, apart, versions),
        {"sparkdl": __version__},
    )


def worker_frame(workers: Workers, seed: int) -> DataFrame:
    """The rows as workers receive them: only what is needed, packed, spread evenly, in order.

    A shuffle delivers the same set of rows to a partition in every run, but in another order. A
    hash with the seed orders them the same way each time: the hash of where a row was before the
    shuffle if that is the same in every run, else of its content, which costs time. The workers
    sort by it: 8 bytes a row, where Spark would sort the rows. Rows that come from files straight
    to the workers need none.
    """

    def order(*identity: Column) -> Column:
        return F.xxhash64(F.lit(seed), *identity).alias(ORDER_COLUMN)

    columns = enumerate(workers.columns)
    rows = workers.frame.select(*[c.expression().alias(f"c{index}") for index, c in columns])
    stable = has_stable_order(workers.frame)
    if workers.repartition:
        if stable:
            rows = rows.select("*", order(F.monotonically_increasing_id()))
        rows = rows.repartition(workers.num_tasks)
    rows = packed(rows)
    return rows if stable else rows.select("*", order(*[quoted(name) for name in rows.columns]))


def run_on_rows(
    workers: Workers, seed: int, task: Task, output: str, *, barrier: bool
) -> list[Row]:
    """Run the tasks; after a shuffle where barrier mode refuses what is upstream in their stage.

    Args:
        workers: whose rows, and how many tasks.
        seed: of the rows' order.
        task: what to run on each partition.
        output: the schema of what it yields, as DDL.
        barrier: whether all have to run at once.

    Returns:
        What the tasks have yielded.
    """

    def run_on(rows: DataFrame) -> list[Row]:
        spark = rows.sparkSession
        profile = gpu_profile(spark, workers.device)
        with small_record_batches(spark.sparkContext):
            return rows.mapInArrow(task, output, barrier=barrier, profile=profile).collect()

    try:
        return run_on(worker_frame(workers, seed))
    except Exception as error:
        if _FORBIDDEN_LINEAGE not in str(error):
            raise
        logger.info("a shuffle is put before the workers: %s", _FORBIDDEN_LINEAGE)
    return run_on(worker_frame(replace(workers, repartition=True), seed))


def as_training_error(error: Exception) -> SetupError | TrainingError:
    """Say why the Spark job failed, in the words of our own bootstrap if it was that."""
    text = str(error)
    start = text.find(bootstrap.MARKER)
    if start >= 0:
        return SetupError(text[start:].splitlines()[0])
    if lacking := _NEEDED_BY_PYSPARK.search(text):
        return SetupError(
            f"the Python on the executors lacks what PySpark itself needs: {lacking[0]}. The "
            f"driver's Python is {sys.executable}: point PYSPARK_PYTHON at one like it before the "
            "session is made (sparkdl.create_session does), or install the driver's packages there"
        )
    if unreachable := _UNREACHABLE.search(text):
        return TrainingError(
            f"{unreachable[1].strip()}. Executors have to reach the driver on a port that it "
            "chooses for each run: is spark.driver.host an address of this machine that they "
            "know, and is there no firewall in between?"
        )
    message = f"the Spark job that runs the workers failed: {text}"
    if is_loss(text):
        advice = memory_advice(text)
        return WorkerLostError(f"{message}\n{advice}" if advice else message)
    return TrainingError(message)
