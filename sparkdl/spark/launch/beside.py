"""A run of a Spark Connect client: one gang-scheduled stage, with the averager beside rank 0.

Executors cannot reach a client, so the process of the first task does what a driver does elsewhere,
and the ranks of that task have processes of their own:

    first task: serves the run     other tasks
    allGather(address)  <--------> allGather("")     who listens where, and the token
    rounds              <--------> train
    rows with the result           rows with what the ranks return

The rows go to the client once the first task has ended. It then ends the stage, whatever the other
tasks do, unless it awaits what they return.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark.sql import DataFrame, Row, SparkSession

from sparkdl.errors import SparkDLError, TrainingError, WorkerLostError
from sparkdl.spark.catalyst.versions import on_tasks
from sparkdl.spark.closures.sending import send
from sparkdl.spark.cluster.gpus import gpu_profile
from sparkdl.spark.cluster.run_jobs import JOB_END_S
from sparkdl.spark.diagnostics.task_failures import memory_advice
from sparkdl.spark.launch import bootstrap, stage_task
from sparkdl.spark.launch.assignment import OUTPUT_DDL, assignments, given_rows, hosted
from sparkdl.spark.launch.environments import sparkdl_version, torch_version
from sparkdl.spark.launch.forked import end_ranks
from sparkdl.spark.launch.launcher import LEAVE_S, as_training_error
from sparkdl.spark.launch.stage_task import MEET_S, SERVED, gathered
from sparkdl.spark.launch.worker_rows import Workers, on_rows
from sparkdl.spark.modules.arrival import Arrived, Shipment
from sparkdl.spark.rows.packing import small_record_batches
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.user_code.tracebacks import message_of

logger = logging.getLogger(__name__)

Serve = Callable[["FirstTask"], Iterator[bytes]]
"""Serves a run in the first task; yields what the client is to receive, an error of the run too."""


@dataclass(frozen=True, kw_only=True)
class RunInStage:
    """One run in one stage of its own.

    Attributes:
        spark: the session.
        entry: what each rank runs; see ``assignment.run_ranks``.
        begin_s: seconds for the first task to begin to serve, which may have to build a model.
        payload: its first argument, a pickled tuple whose last value is a ``Serve``. The second is
            the address of whatever that serves.
        further: its further arguments.
        tasks: how many there are.
        ranks_a_task: ranks per task.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        shipment: the user's own modules.
        apart: whether the only rank of a task gets a process of its own too; in the first task it
            does.
        rows: those that the workers read; None for none.
        results: what ranks have returned, by rank, once all was answered.
    """

    spark: SparkSession
    entry: str
    begin_s: float
    payload: bytes = field(repr=False)
    further: tuple[Any, ...] = ()
    tasks: int
    ranks_a_task: int
    device: str
    shipment: Shipment | None
    apart: bool = False
    rows: Workers | None
    results: dict[int, bytes | None] = field(default_factory=dict)

    def answered(self, patience_s: float) -> Iterator[bytes]:
        """Run it.

        Args:
            patience_s: seconds that the other tasks have once the first has answered.

        Yields:
            What ``Serve`` yields. Whoever stops listening ends the stage.

        Raises:
            WorkerLostError: a task was lost, and all others with it.
            SetupError: the executors' Python lacks something.
            TrainingError: the stage failed in another way.
        """
        tag = f"sparkdl-{uuid.uuid4().hex}"
        # The others leave by themselves, which keeps their processes for the session's next job.
        stuck = threading.Timer(patience_s, self.spark.interruptTag, (tag,))
        self.spark.addTag(tag)
        try:
            for row in self._rows():
                if row.rank != SERVED:
                    self.results[row.rank] = None if row.result is None else bytes(row.result)
                elif row.result:
                    yield bytes(row.result)
                else:
                    stuck.start()
        except Exception as error:
            if stuck.ident is None:
                raise as_training_error(error) from error
            logger.info("the stage did not end by itself: %s", message_of(error))
        finally:
            stuck.cancel()
            self.spark.removeTag(tag)
            self.spark.interruptTag(tag)  # does nothing to a stage that has ended

    def _rows(self) -> Iterator[Row]:
        arguments = (
            self.entry,
            send(self.spark, self.payload),
            self.further,
            self.tasks,
            self.ranks_a_task,
            self.apart,
            self.begin_s,
            self.shipment and tuple(self.shipment),
            torch_version(),
        )
        task = bootstrap.make_task(
            f"{stage_task.__name__}:run_stage_task", arguments, sparkdl_version()
        )
        profile = gpu_profile(self.spark, self.device)

        def run_on(frame: DataFrame) -> Iterator[Row]:
            with small_record_batches(self.spark):
                tasks = on_tasks(frame, task, OUTPUT_DDL, barrier=True, profile=profile)
                rows = tasks.toLocalIterator()
            first = list(itertools.islice(rows, 1))  # raises if barrier mode refuses the rows
            return itertools.chain(first, rows)

        if self.rows is None:
            return run_on(self.spark.range(0, self.tasks, 1, self.tasks))
        return on_rows(self.rows, run_on, barrier=True)


class FirstTask:
    """The ranks of the first task, as seen from the process that serves the run.

    Args:
        context: the task's.
        ranks: ranks per task.
        entry: what each runs.
        arguments: the first of its arguments, and those after the address.
        arrived: the user's own modules.
        versions: the versions of the packages that a rank needs.
        batches: the task's rows, packed.
        begun: called once it serves.

    Attributes:
        host: the name of this host, by which the executors know it.
        yielded: what the ranks have yielded.
    """

    def __init__(
        self,
        context: BarrierTaskContext,
        ranks: int,
        entry: str,
        arguments: tuple[bytes, tuple[Any, ...]],
        arrived: Arrived,
        versions: dict[str, str],
        batches: Iterator[pa.RecordBatch],
        begun: Callable[[], None],
    ) -> None:
        self.host = context.getTaskInfos()[0].address.rpartition(":")[0].strip("[]")
        self.yielded: list[pa.RecordBatch] = []
        self._context, self._assigned = context, assignments(context, ranks)
        self._entry, self._arguments, self._arrived = entry, arguments, arrived
        self._versions, self._batches, self._begun = versions, batches, begun
        self._told: Future[list[str]] | None = None
        self._lost: WorkerLostError | None = None

    def others_know(self) -> None:
        """Wait, now that the run has ended, until the other tasks know what they are to do.

        They do not if one has been stuck since it was started.
        """
        if self._told is None:  # the run failed before it was served
            self._tell("null")
        assert self._told is not None
        try:
            self._told.result(MEET_S)
        except Exception as error:  # TimeoutError, or what Spark says
            logger.info("the other tasks were not told of the end: %s", message_of(error))

    @contextmanager
    def workers(
        self, address: ServiceAddress, fail: Callable[[SparkDLError], None]
    ) -> Iterator[None]:
        """Start the workers, and wait for those of this task at the end.

        Args:
            address: of what serves them.
            fail: ends the run. It is told of whatever goes wrong with this task's workers; what
                comes after the run's own end is dropped there.

        Raises:
            WorkerLostError: one was lost; says how its process ended, if it was one of these.
        """
        thread = threading.Thread(
            target=self._work, args=(address, fail), name="sparkdl-ranks", daemon=True
        )
        patience_s = LEAVE_S
        thread.start()
        self._tell(json.dumps(astuple(address)))
        try:
            yield
            patience_s = JOB_END_S
        except WorkerLostError as error:
            thread.join(LEAVE_S)
            if self._lost is None or self._lost is error:
                raise
            told = f"{self._lost}. {memory_advice(str(self._lost))}".rstrip()
            raise WorkerLostError(f"{error}: {told}", ranks=error.ranks) from error
        finally:
            thread.join(patience_s)
            if thread.is_alive():  # they are stuck
                end_ranks()
                thread.join(JOB_END_S)

    def _tell(self, message: str) -> None:
        """Tell the other tasks something once all have come."""
        self._begun()
        self._told = gathered(self._context, message)

    def _work(self, address: ServiceAddress, fail: Callable[[SparkDLError], None]) -> None:
        payload, further = self._arguments
        try:
            self.yielded += hosted(
                self._entry,
                (payload, astuple(address), *further),
                self._assigned,
                self._arrived,
                {},
                self._versions,
                given_rows(self._batches),
            )
        except WorkerLostError as error:
            self._lost = error
            fail(error)
        except Exception as error:  # whatever it is, nobody else will say it
            fail(TrainingError(f"the workers of the first task: {message_of(error)}"))
