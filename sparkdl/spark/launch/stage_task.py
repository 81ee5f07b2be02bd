"""What each task of a stage does that serves its own run; see ``launch.beside``.

At the top it imports no torch: the processes of ranks begin to, before this one does.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, TimeoutError  # not yet Python's own in 3.10
from typing import Any

import cloudpickle
import pyarrow as pa
from pyspark import BarrierTaskContext

from sparkdl.errors import DeadlineError
from sparkdl.process.interrupts import raise_after
from sparkdl.spark.closures.sending import SentBytes
from sparkdl.spark.launch import bootstrap
from sparkdl.spark.launch.assignment import OUTPUT_SCHEMA, run_ranks
from sparkdl.spark.launch.forked import start_server
from sparkdl.spark.modules.arrival import Shipment, arrive, importable

MEET_S = 10.0
"""Seconds for all tasks to come to a meeting for which they are ready; Spark takes one or two."""
SERVED = -1
"""In place of a rank, in the rows of what serves the ranks."""
ALL_SAID = b""
"""The last of these rows."""


def run_stage_task(
    entry: str,
    payload: SentBytes,
    further: tuple[Any, ...],
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
        entry: as in ``RunInStage``.
        payload: as in ``RunInStage``.
        further: as in ``RunInStage``.
        tasks: how many there should be.
        ranks: ranks per task.
        apart: as in ``RunInStage``.
        begin_s: as in ``RunInStage``.
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
        from sparkdl.spark.launch.beside import FirstTask

        bootstrap.require(versions)
        defer_compiler()
        arrived = arrive(None if shipment is None else Shipment(*shipment))
        with streams_put_back(), importable(arrived):
            *_, serve = cloudpickle.loads(payload.value)
            arguments = (payload.value, further)
            first = FirstTask(context, ranks, entry, arguments, arrived, versions, batches, begun)
            for piece in serve(first):
                yield _row_of(piece)
            first.others_know()
            yield from first.yielded
            yield _row_of(ALL_SAID)
    else:
        if not apart:
            importlib.import_module(entry.partition(":")[0])  # the first task does so meanwhile
        try:
            (told,) = filter(None, gathered(context, "").result(begin_s + MEET_S))
        except TimeoutError:
            raise late("") from None
        if (address := json.loads(told)) is not None:
            arguments = (tuple(address), *further)
            yield from run_ranks(
                entry, payload, arguments, ranks, apart, shipment, {}, versions, batches
            )
    for _ in batches:  # or Spark does not use this process again
        pass


def gathered(context: BarrierTaskContext, message: str) -> Future[list[str]]:
    """Meet all other tasks without waiting for them, as Spark would for a year.

    Args:
        context: the task's.
        message: what the others are told.

    Returns:
        What all tell.
    """
    told = Future[list[str]]()

    def gather() -> None:
        try:
            told.set_result(context.allGather(message))
        except Exception as error:  # for whoever waits
            told.set_exception(error)

    threading.Thread(target=gather, name="sparkdl-meeting", daemon=True).start()
    return told


def _row_of(piece: bytes) -> pa.RecordBatch:
    arrays = [pa.array([SERVED]), pa.array([piece], pa.binary())]
    return pa.record_batch(arrays, OUTPUT_SCHEMA)
