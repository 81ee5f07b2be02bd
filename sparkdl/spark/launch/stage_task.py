"""What each task of a stage does that serves its own run; see ``launch.beside``.

At the top it imports no torch: the processes of ranks begin to, before this one does.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pyarrow as pa
from pyspark import BarrierTaskContext

from sparkdl.spark.catalyst.accumulators import counted
from sparkdl.spark.catalyst.core import Broadcast
from sparkdl.spark.closures.sending import SentBytes
from sparkdl.spark.launch import bootstrap
from sparkdl.spark.launch.assignment import OUTPUT_SCHEMA, run_ranks, started_for
from sparkdl.spark.modules.arrival import Shipment, arrive, importable

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
    shipment: tuple[Any, ...] | None,
    broadcasts: dict[int, Broadcast[Any]],
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
        broadcasts: as in ``RunInStage``.
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
    if serves or apart or ranks > 1:
        started_for(entry, versions)
    if serves:
        from sparkdl.process.lazy_compiler import defer_compiler
        from sparkdl.process.randomness import streams_put_back
        from sparkdl.spark.launch.beside import FirstTask

        bootstrap.require(versions)
        defer_compiler()
        arrived = arrive(None if shipment is None else Shipment(*shipment))
        with streams_put_back(), importable(arrived):
            *_, serve = cloudpickle.loads(payload.value)
            arguments = (payload.value, further)
            first = FirstTask(
                context, ranks, entry, arguments, arrived, broadcasts, versions, batches
            )
            try:
                for piece in serve(first):
                    yield _row_of(piece)
            finally:
                first.tell(None)
            yield from counted(iter(first.yielded))
            yield _row_of(ALL_SAID)
    else:
        if not apart:
            importlib.import_module(entry.partition(":")[0])  # the first task does so meanwhile
        (told,) = filter(None, context.allGather(""))
        if (address := json.loads(told)) is not None:
            arguments = (payload.value, tuple(address), *further)
            yield from run_ranks(
                entry, arguments, ranks, apart, shipment, broadcasts, versions, batches
            )
    for _ in batches:  # or Spark does not use this process again
        pass


def _row_of(piece: bytes) -> pa.RecordBatch:
    arrays = [pa.array([SERVED]), pa.array([piece], pa.binary())]
    return pa.record_batch(arrays, OUTPUT_SCHEMA)
