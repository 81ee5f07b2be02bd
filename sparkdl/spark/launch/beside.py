"""A run whose averager is beside rank 0: one gang-scheduled stage, for drivers out of reach.

A client of Spark Connect cannot be reached by executors, so the process of the first task does what
a driver does elsewhere, and the ranks of that task have processes of their own:

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
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import cloudpickle
import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark import cloudpickle as spark_cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession

from sparkdl.errors import SparkDLError, TrainingError, WorkerLostError
from sparkdl.process.lazy_compiler import defer_compiler
from sparkdl.process.randomness import streams_put_back
from sparkdl.spark.closures import sending
from sparkdl.spark.closures.sending import SentBytes, send
from sparkdl.spark.cluster.gpus import gpu_profile
from sparkdl.spark.cluster.run_jobs import JOB_END_S
from sparkdl.spark.diagnostics.task_failures import memory_advice
from sparkdl.spark.launch import bootstrap
from sparkdl.spark.launch.assignment import (
    OUTPUT_DDL,
    OUTPUT_SCHEMA,
    assignments,
    given_rows,
    hosted,
    run_ranks,
)
from sparkdl.spark.launch.environments import sparkdl_version, torch_version
from sparkdl.spark.launch.forked import fork_server
from sparkdl.spark.launch.launcher import LEAVE_S, as_training_error
from sparkdl.spark.launch.worker_rows import Workers, on_rows
from sparkdl.spark.modules.arrival import Arrived, Shipment, arrive, importable
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.user_code.tracebacks import message_of

logger = logging.getLogger(__name__)

Serve = Callable[["FirstTask"], Iterator[bytes]]
"""Serves a run in the first task; yields what the client is to receive. It raises nothing: an error
is a result."""

_SERVED = -1
"""In place of a rank, in the rows of what serves the ranks."""
_ALL_SAID = b""

spark_cloudpickle.register_pickle_by_value(sending)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class RunInStage:
    """One run in one stage of its own.

    Attributes:
        spark: the session, of Spark Connect.
        entry: what each rank runs; see ``assignment.run_ranks``.
        payload: its first argument, a pickled tuple whose last value is a ``Serve``. The second is
            the address of whatever that serves.
        further: its further arguments.
        tasks: how many there are.
        ranks_a_task: ranks per task.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        shipment: the user's own modules.
        apart: whether the only rank of a task gets a process of its own too; in the first task it
            does.
        rows: those that the workers read, and what determines their order; None for none.
        results: what ranks have returned, by rank, once all was answered.
    """

    spark: SparkSession
    entry: str
    payload: bytes = field(repr=False)
    further: tuple[Any, ...] = ()
    tasks: int
    ranks_a_task: int
    device: str
    shipment: Shipment | None
    apart: bool = False
    rows: tuple[Workers, int] | None
    results: dict[int, bytes | None] = field(default_factory=dict)

    def answered(self, patience_s: float) -> Iterator[bytes]:
        """Run it, in the thread of the caller.

        Args:
            patience_s: seconds that the other tasks have once the first has answered.

        Yields:
            What ``Serve`` yields. Whoever stops listening ends the stage.

        Raises:
            WorkerLostError: a task was lost, and all others with it.
            SetupError: the executors' Python lacks something.
            TrainingError: the stage failed in another way.
        """
        spark = self.spark
        tag = f"sparkdl-{uuid.uuid4().hex}"
        # The others leave by themselves, which keeps their processes for the session's next job.
        stuck = threading.Timer(patience_s, spark.interruptTag, [tag])
        spark.addTag(tag)
        try:
            for row in self._rows():
                if row.rank != _SERVED:
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
            spark.removeTag(tag)
            spark.interruptTag(tag)  # does nothing to a stage that has ended

    def _rows(self) -> Iterator[Row]:
        arguments = (
            self.entry,
            send(self.spark, self.payload),
            self.further,
            self.tasks,
            self.ranks_a_task,
            self.apart,
            self.shipment and tuple(self.shipment),
            torch_version(),
        )
        task = bootstrap.make_task(f"{__name__}:run_stage_task", arguments, sparkdl_version())
        profile = gpu_profile(self.spark, self.device)

        def run_on(frame: DataFrame) -> Iterator[Row]:
            tasks = frame.mapInArrow(task, OUTPUT_DDL, barrier=True, profile=profile)
            rows = tasks.toLocalIterator()
            first = list(itertools.islice(rows, 1))  # raises if barrier mode refuses the rows
            return itertools.chain(first, rows)

        if self.rows is None:
            return run_on(self.spark.range(0, self.tasks, 1, self.tasks))
        workers, seed = self.rows
        return on_rows(workers, seed, run_on, barrier=True)


def run_stage_task(
    entry: str,
    payload: SentBytes,
    further: tuple[Any, ...],
    tasks: int,
    ranks: int,
    apart: bool,
    shipment: tuple[Any, ...] | None,
    versions: dict[str, str],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """What each task of the stage runs.

    Args:
        entry: as in ``RunInStage``.
        payload: as in ``RunInStage``.
        further: as in ``RunInStage``.
        tasks: how many there should be.
        ranks: ranks per task.
        apart: as in ``RunInStage``.
        shipment: the fields of a ``Shipment``; None for none.
        versions: the versions of the packages that a rank needs.
        batches: the task's rows, packed.

    Yields:
        What the ranks yield and, in the first task, what ``Serve`` yields, a piece in a row.
    """
    context = BarrierTaskContext.get()
    infos = context.getTaskInfos()
    if len(infos) != tasks:
        raise RuntimeError(f"Spark made {len(infos)} tasks where {tasks} were asked for")
    if context.partitionId() == 0:
        bootstrap.require(versions)
        defer_compiler()
        arrived = arrive(None if shipment is None else Shipment(*shipment))
        with streams_put_back(), importable(arrived):
            *_, serve = cloudpickle.loads(payload.value)
            arguments = (payload.value, further)
            first = FirstTask(context, ranks, entry, arguments, arrived, versions, batches)
            try:
                for piece in serve(first):
                    yield _row_of(piece)
            finally:
                first.tell(None)
            yield from first.yielded
            yield _row_of(_ALL_SAID)
    else:
        (told,) = filter(None, context.allGather(""))
        if (address := json.loads(told)) is not None:
            arguments = (payload.value, tuple(address), *further)
            yield from run_ranks(entry, arguments, ranks, apart, shipment, {}, versions, batches)
    for _ in batches:  # or Spark does not use this process again
        pass


def _row_of(piece: bytes) -> pa.RecordBatch:
    arrays = [pa.array([_SERVED]), pa.array([piece], pa.binary())]
    return pa.record_batch(arrays, OUTPUT_SCHEMA)


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
    ) -> None:
        self.host = context.getTaskInfos()[0].address.rpartition(":")[0].strip("[]")
        self.yielded: list[pa.RecordBatch] = []
        self._context, self._assigned = context, assignments(context, ranks)
        self._entry, self._arguments, self._arrived = entry, arguments, arrived
        self._versions, self._batches = versions, batches
        self._told = False
        self._lost: WorkerLostError | None = None

    def tell(self, address: ServiceAddress | None) -> None:
        """Tell the other tasks where the run is served, once; None if it is not."""
        if not self._told:
            self._told = True
            self._context.allGather(json.dumps(None if address is None else astuple(address)))

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
        self.tell(address)
        thread.start()
        patience_s = LEAVE_S
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
                fork_server([], {}).close()
                thread.join(JOB_END_S)

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
