"""A run whose averager is beside rank 0: one gang-scheduled stage, for drivers out of reach.

A client of Spark Connect cannot be reached by executors, so the process of the first task does what
a driver does elsewhere, and the ranks of that task have processes of their own:

    first task: serves the run     other tasks
    allGather(address)  <--------> allGather("")     who listens where, and the token
    rounds              <--------> train
    rows with the result           no rows

The rows go to the client once the first task has ended. It then ends the stage, whatever the other
tasks do.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import cloudpickle
import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark import cloudpickle as spark_cloudpickle
from pyspark.sql import DataFrame, Row

from sparkdl.averager.service.loop import EdgeOptions
from sparkdl.averager.service.server import Averager
from sparkdl.driver import Launch
from sparkdl.errors import TrainingError, WorkerLostError
from sparkdl.process.lazy_compiler import defer_compiler
from sparkdl.process.randomness import streams_put_back
from sparkdl.spark.closures import sending
from sparkdl.spark.closures.pickling import References, pickled
from sparkdl.spark.closures.sending import SentBytes, send
from sparkdl.spark.cluster.gpus import gpu_profile
from sparkdl.spark.cluster.run_jobs import JOB_END_S
from sparkdl.spark.diagnostics.console import Console, Show
from sparkdl.spark.launch import bootstrap
from sparkdl.spark.launch.assignment import assignments, given_rows, hosted, run_ranks
from sparkdl.spark.launch.environments import sparkdl_version, torch_version
from sparkdl.spark.launch.forked import fork_server
from sparkdl.spark.launch.launcher import LEAVE_S, as_training_error
from sparkdl.spark.launch.worker_rows import Workers, on_rows
from sparkdl.spark.modules.arrival import Arrived, Shipment, arrive, importable
from sparkdl.spark.modules.shipping import ship
from sparkdl.spark.session.encryption import keeps_rows_in_memory
from sparkdl.user_code.tracebacks import message_of
from sparkdl.worker import Job

logger = logging.getLogger(__name__)

Serve = Callable[[Callable[[Show], Launch], EdgeOptions], Iterator[bytes]]
"""Serves a run in the first task, given what starts the workers for whoever shows their lines, and
where to listen; yields what the client is to receive. It raises nothing: an error is a result."""

PIECE_BYTES = 1 << 20
"""The most bytes in a row."""
_ALL_SAID = b""
_DDL = "content binary"
_SCHEMA = pa.schema([("content", pa.binary())])
_ENTRY = "sparkdl.spark.launch.task:run_worker_task"

spark_cloudpickle.register_pickle_by_value(sending)  # type: ignore[no-untyped-call]


def run_in_stage(workers: Workers, job: Job, serve: Serve) -> Iterator[bytes]:
    """Run one job in one stage of its own, in the thread of the caller.

    Args:
        workers: the Spark side of the run, of Spark Connect.
        job: what every worker trains.
        serve: runs in the first task.

    Yields:
        What ``serve`` yields. Whoever stops listening ends the stage.

    Raises:
        WorkerLostError: a task was lost, and all others with it.
        SetupError: the executors' Python lacks something.
        TrainingError: the stage failed in another way.
    """
    spark = workers.frame.sparkSession
    used = References()
    in_memory = keeps_rows_in_memory(spark, workers.store_in)
    payload = send(spark, pickled((job, workers.network, in_memory, serve), used))
    shipment = ship(used.names, spark) if workers.ship_modules else None
    arguments = (
        payload,
        workers.num_tasks,
        workers.ranks_a_task,
        workers.device,
        shipment and tuple(shipment),
        torch_version(),
    )
    task = bootstrap.make_task(f"{__name__}:run_stage_task", arguments, sparkdl_version())
    tag, profile = f"sparkdl-{uuid.uuid4().hex}", gpu_profile(spark, workers.device)

    def run_on(frame: DataFrame) -> Iterator[Row]:
        rows = frame.mapInArrow(task, _DDL, barrier=True, profile=profile).toLocalIterator()
        first = list(itertools.islice(rows, 1))  # raises if barrier mode refuses the rows
        return itertools.chain(first, rows)

    # The others leave by themselves, which keeps their processes for the session's next job.
    stuck = threading.Timer(LEAVE_S, spark.interruptTag, [tag])
    spark.addTag(tag)
    try:
        for row in on_rows(workers, job.seed, run_on, barrier=True):
            if row.content:
                yield bytes(row.content)
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


def run_stage_task(
    payload: SentBytes,
    tasks: int,
    ranks: int,
    device: str,
    shipment: tuple[Any, ...] | None,
    versions: dict[str, str],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """What each task of the stage runs.

    Args:
        payload: the pickled ``Job``, ``Network``, what demands that rows stay in memory, ``Serve``.
        tasks: how many there should be.
        ranks: ranks per task.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        shipment: the fields of a ``Shipment``; None for none.
        versions: the versions of the packages that a rank needs.
        batches: the task's rows, packed.

    Yields:
        In the first task, what ``Serve`` yields, a piece in a row.
    """
    context = BarrierTaskContext.get()
    infos = context.getTaskInfos()
    if len(infos) != tasks:
        raise RuntimeError(f"Spark made {len(infos)} tasks where {tasks} were asked for")
    if context.partitionId() == 0:
        bootstrap.require(versions)
        defer_compiler()
        host = infos[0].address.rpartition(":")[0].strip("[]")
        edge = EdgeOptions(host=host, advertised_host=host)
        arrived = arrive(None if shipment is None else Shipment(*shipment))
        with streams_put_back(), importable(arrived):
            *_, serve = cloudpickle.loads(payload.value)
            first = _FirstTask(context, ranks, device, payload.value, arrived, versions, batches)
            try:
                for piece in itertools.chain(serve(first.launch, edge), [_ALL_SAID]):
                    yield pa.record_batch([pa.array([piece], pa.binary())], _SCHEMA)
            finally:
                first.tell(None)
    else:
        (told,) = filter(None, context.allGather(""))
        if (address := json.loads(told)) is not None:
            arguments = (payload.value, tuple(address), device, True)
            yielded = run_ranks(_ENTRY, arguments, ranks, False, shipment, {}, versions, batches)
            for _ in yielded:  # all that matters went through the averager
                pass
    for _ in batches:  # or Spark does not use this process again
        pass


class _FirstTask:
    """The ranks of the first task, as seen from the process that serves the run.

    Args:
        context: the task's.
        ranks: ranks per task.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        payload: for ``run_worker_task``.
        arrived: the user's own modules.
        versions: the versions of the packages that a rank needs.
        batches: the task's rows, packed.
    """

    def __init__(
        self,
        context: BarrierTaskContext,
        ranks: int,
        device: str,
        payload: bytes,
        arrived: Arrived,
        versions: dict[str, str],
        batches: Iterator[pa.RecordBatch],
    ) -> None:
        self._context, self._assigned = context, assignments(context, ranks)
        self._device, self._payload, self._arrived = device, payload, arrived
        self._versions, self._batches = versions, batches
        self._told = False

    def tell(self, address: Sequence[Any] | None) -> None:
        """Tell the other tasks where the averager is, once; None if there is none."""
        if not self._told:
            self._told = True
            self._context.allGather(json.dumps(address))

    def launch(self, show: Show) -> Launch:
        """Prepare to start the workers.

        Args:
            show: shows what they print.
        """

        @contextmanager
        def start(averager: Averager) -> Iterator[None]:
            address = astuple(averager.address)
            thread = threading.Thread(
                target=self._host, args=(averager, address), name="sparkdl-ranks", daemon=True
            )
            with Console(averager.service, show):
                self.tell(address)
                thread.start()
                patience_s = LEAVE_S
                try:
                    yield
                    patience_s = JOB_END_S
                finally:
                    thread.join(patience_s)
                    if thread.is_alive():  # they are stuck
                        fork_server([], {}).close()
                        thread.join(JOB_END_S)

        return start

    def _host(self, averager: Averager, address: tuple[Any, ...]) -> None:
        arguments = (self._payload, address, self._device, True)
        try:
            for _ in hosted(
                _ENTRY,
                arguments,
                self._assigned,
                self._arrived,
                {},
                self._versions,
                given_rows(self._batches),
            ):
                pass
            averager.fail(TrainingError("a worker exited without reporting why"))
        except WorkerLostError as error:
            averager.fail(error)
        except Exception as error:  # whatever it is, nobody else will say it
            averager.fail(TrainingError(f"the workers of the first task: {message_of(error)}"))
