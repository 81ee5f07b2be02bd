"""What each task of a stage does that serves its own run; see ``launch.beside``.

At the top it imports no torch: the processes of ranks begin to, before this one does.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, TimeoutError, wait  # the error is Python's own since 3.11
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import pyarrow as pa
from pyspark import BarrierTaskContext

from sparkdl.errors import DeadlineError, SparkDLError, TrainingError, WorkerLostError
from sparkdl.process.interrupts import raise_after
from sparkdl.spark.arrival import Shipment, arrive, importable
from sparkdl.spark.cluster.run_jobs import JOB_END_S
from sparkdl.spark.diagnostics.task_failures import memory_advice
from sparkdl.spark.launch import bootstrap
from sparkdl.spark.launch.assignment import (
    OUTPUT_SCHEMA,
    assignments,
    given_rows,
    hosted,
    run_ranks,
)
from sparkdl.spark.launch.rank_host import end_ranks, start_server
from sparkdl.spark.sending import SentBytes
from sparkdl.transport.daemon_pool import DaemonPool
from sparkdl.user_code.tracebacks import message_of

if TYPE_CHECKING:  # these import torch
    from sparkdl.spark.launch.beside import ForwardedLogs
    from sparkdl.transport.connecting import ServiceAddress

logger = logging.getLogger(__name__)

MEET_S = 10.0
"""Seconds for all tasks to come to a meeting for which they are ready; Spark takes one or two."""
SERVICE_ROW = -1
"""In place of a rank, in the rows of what serves the ranks."""
END_OF_ANSWER = b""
"""The last of these rows."""

StartWorkers = Callable[
    ["ServiceAddress", Callable[[SparkDLError], None]], AbstractContextManager[None]
]
"""Starts the workers, given what serves them and what ends the run; waits for those of this task.

What comes to the latter after the run's own end is dropped there. On exit it raises WorkerLostError
if one was lost, with how its process ended if it was one of these.
"""
Serve = Callable[[str, StartWorkers, "ForwardedLogs"], tuple[dict[str, Any], Iterable[memoryview]]]
"""Serves a run in the first task, on a host that executors know by this name.

Returns what the client is to receive: fields of a header, and bytes.
"""
T = TypeVar("T")


def run_stage_task(
    entry: str,
    payload: SentBytes,
    tasks: int,
    ranks: int,
    apart: bool,
    begin_s: float,
    shipment: tuple[Any, ...] | None,
    versions: dict[str, str],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """What each task of the stage runs.

    Args:
        entry: as in ``read_stage``.
        payload: as in ``read_stage``.
        tasks: how many there should be.
        ranks: ranks per task.
        apart: as in ``read_stage``.
        begin_s: as in ``read_stage``.
        shipment: the fields of a ``Shipment``; None for none.
        versions: the versions of the packages that a rank needs.
        batches: the task's rows, packed.

    Yields:
        What the ranks yield and, in the first task, what serves them, a piece in a row.
    """
    context = BarrierTaskContext.get()
    infos = context.getTaskInfos()
    if len(infos) != tasks:
        raise RuntimeError(f"Spark made {len(infos)} tasks where {tasks} were asked for")
    serves = context.partitionId() == 0

    def late(where: str) -> DeadlineError:
        return DeadlineError(
            f"the first task, on {infos[0].address}, has not begun to serve the workers within "
            f"{begin_s:g} s: does the function that builds the model hang there, or something that "
            f"it imports? If it takes longer here, raise the estimator's 'timeout'{where}"
        )

    if serves or apart or ranks > 1:
        start_server()
    if serves:
        begun = raise_after(begin_s, lambda stack: late(f". It was here:\n{stack}"))
        from sparkdl.process.lazy_compiler import defer_compiler
        from sparkdl.process.randomness import streams_put_back

        bootstrap.require(versions)
        defer_compiler()
        arrived = arrive(None if shipment is None else Shipment(*shipment))

        def ranks_here(address: tuple[Any, ...]) -> list[pa.RecordBatch]:
            arguments, mine = (payload.value, address), assignments(context, ranks)
            rows = given_rows(batches)
            return list(hosted(entry, arguments, mine, arrived, versions, rows))

        with streams_put_back(), importable(arrived):
            *_, serve = cloudpickle.loads(payload.value)
            yield from serve_beside_rank0(context, serve, ranks_here, begun)
    else:
        if not apart:
            importlib.import_module(entry.partition(":")[0])  # the first task does so meanwhile
        try:
            told = in_background(partial(context.allGather, "")).result(begin_s + MEET_S)
        except TimeoutError:
            raise late("") from None
        if (address := json.loads("".join(told))) is not None:
            yield from run_ranks(
                entry, payload, (tuple(address),), ranks, apart, shipment, versions, batches
            )
    for _ in batches:  # or Spark does not use this process again
        pass


def in_background(job: Callable[[], T]) -> Future[T]:
    """Do something in a thread that this process does not wait for, as Spark would for a year."""
    pool = DaemonPool(1, "sparkdl-stage")
    result = pool.submit(job)
    pool.close()  # once that is done
    return result


def serve_beside_rank0(
    context: BarrierTaskContext,
    serve: Serve,
    ranks_here: Callable[[tuple[Any, ...]], list[pa.RecordBatch]],
    begun: Callable[[], None],
) -> Iterator[pa.RecordBatch]:
    """Serve a run in the first task of its stage.

    Args:
        context: the task's.
        serve: serves it.
        ranks_here: runs this task's ranks, given the fields of an address; returns what they yield.
        begun: called once the workers are served.

    Yields:
        What ``serve`` returns, then what the ranks yield.
    """
    from sparkdl.spark.launch.beside import ForwardedLogs, error_fields, pieces
    from sparkdl.spark.launch.launcher import LEAVE_S

    host = context.getTaskInfos()[0].address.rpartition(":")[0].strip("[]")
    meeting: Future[list[str]] | None = None
    ranks = Future[list[pa.RecordBatch]]()

    def tell(message: str) -> None:
        """Tell the other tasks something once all have come."""
        nonlocal meeting
        begun()
        meeting = in_background(partial(context.allGather, message))

    @contextmanager
    def workers(address: ServiceAddress, fail: Callable[[SparkDLError], None]) -> Iterator[None]:
        """See ``StartWorkers``."""
        nonlocal ranks

        def work() -> list[pa.RecordBatch]:
            try:
                return ranks_here(astuple(address))
            except WorkerLostError as error:
                fail(error)
                raise
            except Exception as error:  # whatever it is, nobody else will say it
                fail(TrainingError(f"the workers of the first task: {message_of(error)}"))
                raise

        patience_s = LEAVE_S
        ranks = in_background(work)
        tell(json.dumps(astuple(address)))
        try:
            yield
            patience_s = JOB_END_S
        except WorkerLostError as error:
            wait([ranks], LEAVE_S)
            lost = ranks.exception() if ranks.done() else None
            if not isinstance(lost, WorkerLostError) or lost is error:
                raise
            told = f"{lost}. {memory_advice(str(lost))}".rstrip()
            raise WorkerLostError(f"{error}: {told}", ranks=error.ranks) from error
        finally:
            if wait([ranks], patience_s).not_done:  # they are stuck
                end_ranks()
                wait([ranks], JOB_END_S)

    header: dict[str, Any] = {}
    values: Iterable[memoryview] = ()
    with ForwardedLogs() as logs:
        try:
            header, values = serve(host, workers, logs)
        except Exception as error:
            header["error"] = error_fields(error)
    if meeting is None:  # the run failed before it was served
        tell("null")
    for piece in pieces(header | logs.header, values):
        yield _row_of(piece)
    try:
        assert meeting is not None
        meeting.result(MEET_S)
    except Exception as error:  # TimeoutError, or what Spark says
        logger.info("the other tasks were not told of the end: %s", message_of(error))
    if ranks.done() and ranks.exception() is None:
        yield from ranks.result()
    yield _row_of(END_OF_ANSWER)


def _row_of(piece: bytes) -> pa.RecordBatch:
    arrays = [pa.array([SERVICE_ROW]), pa.array([piece], pa.binary())]
    return pa.record_batch(arrays, OUTPUT_SCHEMA)
