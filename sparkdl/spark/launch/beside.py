"""A run whose averager is beside rank 0: one gang-scheduled stage, for drivers out of reach.

Executors cannot reach a client of Spark Connect, nor some drivers, so the process of the first task
does what a driver does elsewhere, and the ranks of that task have processes of their own:

    first task: serves the run     other tasks
    allGather(address)  <--------> allGather("")     who listens where, and the token
    rounds              <--------> train
    rows with the result           rows with what the ranks return

The rows go to a client once the first task has ended. It then ends the stage, whatever the other
tasks do, unless it awaits what they return. A driver gets all rows together, once the last task has
ended. So there the tasks meet once more at the end of the run, and each ends those of its ranks
that are still there some seconds later: they are in processes of their own.

    allGather(seconds)  <--------> allGather("")

A task that has not even come to the first meeting cannot be told. A client ends it with the stage;
in a driver the first task fails with the run's error, which has Spark end all tasks.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark.sql import DataFrame, Row, SparkSession

from sparkdl.errors import SparkDLError, TrainingError, WorkerLostError
from sparkdl.spark.catalyst.core import Broadcast
from sparkdl.spark.catalyst.jvm import is_of_connect
from sparkdl.spark.catalyst.versions import on_tasks
from sparkdl.spark.closures.sending import SentBytes, lent
from sparkdl.spark.cluster.gpus import gpu_profile
from sparkdl.spark.cluster.run_jobs import JOB_END_S
from sparkdl.spark.diagnostics.task_failures import memory_advice
from sparkdl.spark.launch import bootstrap, stage_task
from sparkdl.spark.launch.assignment import OUTPUT_DDL, assignments, given_rows, hosted
from sparkdl.spark.launch.environments import sparkdl_version, torch_version
from sparkdl.spark.launch.forked import end_ranks
from sparkdl.spark.launch.launcher import LEAVE_S
from sparkdl.spark.launch.stage_rows import stage_rows
from sparkdl.spark.launch.stage_task import MEET_S, SERVED, gathered
from sparkdl.spark.launch.worker_rows import Workers, on_rows
from sparkdl.spark.modules.arrival import Arrived, Shipment
from sparkdl.spark.rows.packing import small_record_batches
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.user_code.tracebacks import message_of

logger = logging.getLogger(__name__)

Serve = Callable[["FirstTask"], Iterator[bytes]]
"""Serves a run in the first task; yields what the client is to receive. An error of the run is such
a result too; it is raised only where that would not arrive."""


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
            does, and in a driver's session in all.
        rows: those that the workers read; None for none.
        broadcasts: the broadcast variables that the payload refers to, by number.
        description: shown in the Spark UI.
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
    broadcasts: dict[int, Broadcast[Any]] = field(default_factory=dict)
    description: str = ""
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
        with (
            lent(self.spark, self.payload) as payload,
            stage_rows(self.spark, self.description) as stage,
        ):
            # The others leave by themselves, which keeps their processes for the session's next
            # job.
            stuck = threading.Timer(patience_s, stage.cancel)
            try:
                for row in stage.read(partial(self._rows, payload)):
                    if row.rank != SERVED:
                        self.results[row.rank] = None if row.result is None else bytes(row.result)
                    elif row.result:
                        yield bytes(row.result)
                    else:
                        stuck.start()
            except Exception as error:
                if stuck.ident is None:
                    raise stage.explained(error) from error
                logger.info("the stage did not end by itself: %s", message_of(error))
            finally:
                stuck.cancel()

    def _rows(self, payload: SentBytes) -> Iterator[Row]:
        together = not is_of_connect(self.spark)
        arguments = (
            self.entry,
            payload,
            self.further,
            self.tasks,
            self.ranks_a_task,
            self.apart or together,
            together,
            self.begin_s,
            self.shipment and tuple(self.shipment),
            self.broadcasts,
            torch_version(),
        )
        task = bootstrap.make_task(
            f"{stage_task.__name__}:run_stage_task", arguments, sparkdl_version()
        )
        profile = gpu_profile(self.spark, self.device)

        def run_on(frame: DataFrame) -> Iterator[Row]:
            with small_record_batches(self.spark):
                tasks = on_tasks(frame, task, OUTPUT_DDL, barrier=True, profile=profile)
                # In a driver, ``toLocalIterator`` runs a job for each partition.
                rows = iter(tasks.collect()) if together else tasks.toLocalIterator()
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
        broadcasts: the broadcast variables that the arguments refer to, by number.
        versions: the versions of the packages that a rank needs.
        batches: the task's rows, packed.
        together: as in ``run_stage_task``.
        begun: called once it serves.

    Attributes:
        host: the name of this host, by which the executors know it.
        together: whether rows arrive only once all tasks have ended, as in a driver.
        yielded: what the ranks have yielded.
    """

    def __init__(
        self,
        context: BarrierTaskContext,
        ranks: int,
        entry: str,
        arguments: tuple[bytes, tuple[Any, ...]],
        arrived: Arrived,
        broadcasts: dict[int, Broadcast[Any]],
        versions: dict[str, str],
        batches: Iterator[pa.RecordBatch],
        together: bool,
        begun: Callable[[], None],
    ) -> None:
        self.host = context.getTaskInfos()[0].address.rpartition(":")[0].strip("[]")
        self.yielded: list[pa.RecordBatch] = []
        self._context, self._assigned = context, assignments(context, ranks)
        self._entry, self._arguments, self._arrived = entry, arguments, arrived
        self._broadcasts, self._versions, self._batches = broadcasts, versions, batches
        self.together, self._begun = together, begun
        self._told: Future[list[str]] | None = None
        self._lost: WorkerLostError | None = None

    def others_know(self) -> bool:
        """Whether the other tasks know, now that the run has ended, what they are to do.

        Not if one has been stuck since it was started, nor if ``spark.barrier.sync.timeout`` has
        passed.
        """
        if self._told is None:  # the run failed before it was served
            self._tell("null")
        assert self._told is not None
        try:
            self._told.result(MEET_S)
        except Exception as error:  # TimeoutError, or what Spark says
            logger.info("the other tasks were not told of the end: %s", message_of(error))
            return False
        return True

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
            if self.together:
                self._tell(str(patience_s))
            thread.join(patience_s)
            if thread.is_alive():  # they are stuck
                end_ranks()
                thread.join(JOB_END_S)

    def _tell(self, message: str) -> None:
        """Tell the other tasks something once all have come, after what they are told before."""
        if self._told is None:
            self._begun()
        self._told = gathered(self._context, message, self._told)

    def _work(self, address: ServiceAddress, fail: Callable[[SparkDLError], None]) -> None:
        payload, further = self._arguments
        try:
            self.yielded += hosted(
                self._entry,
                (payload, astuple(address), *further),
                self._assigned,
                self._arrived,
                self._broadcasts,
                self._versions,
                given_rows(self._batches),
            )
        except WorkerLostError as error:
            self._lost = error
            fail(error)
        except Exception as error:  # whatever it is, nobody else will say it
            fail(TrainingError(f"the workers of the first task: {message_of(error)}"))
