"""What Spark has assigned to the ranks of a task, and how a process is started for each.

A task with one GPU or none is one rank; a task with several GPUs
(``spark.task.resource.gpu.amount``) is as many ranks as it has GPUs. Each rank runs in a process of
its own, except the only rank of a task in a fit: that one trains in Spark's own Python process.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from sparkdl.errors import RowsLostError
from sparkdl.feed.packed import unpacked
from sparkdl.process.interrupts import interrupted_by_signals_alone
from sparkdl.spark.arrival import Arrived, Shipment, arrive, importable
from sparkdl.spark.catalyst.accumulators import added_here, counted, restore
from sparkdl.spark.catalyst.jvm import SparkFiles
from sparkdl.spark.cluster.slots import VISIBLE
from sparkdl.spark.diagnostics.stacks import write_threads_on_signal
from sparkdl.spark.launch.bootstrap import require
from sparkdl.spark.launch.rank_host import RankCall, host_ranks
from sparkdl.spark.sending import SentBytes
from sparkdl.user_code.tracebacks import message_of

OUTPUT_SCHEMA = pa.schema(
    [pa.field("rank", pa.int64(), nullable=False), pa.field("result", pa.binary())]
)
OUTPUT_DDL = "rank bigint, result binary"
"""What a task yields: each of its ranks with what came of it, null if it has failed."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What one rank has been assigned.

    Attributes:
        rank: its number; the ranks of one task are numbered consecutively.
        task: the number of its task.
        attempt: the ID of the task's attempt.
        cores: the number of cores it may use.
        gpu: the address of its GPU, as Spark reports it; None if Spark has assigned none.
        of_task: the GPUs of all ranks of its task, in rank order.
    """

    rank: int
    task: int
    attempt: int
    cores: int
    gpu: str | None
    of_task: tuple[str | None, ...]

    @property
    def environment(self) -> dict[str, str]:
        """The variables to set in a process before it first uses CUDA.

        Of split (MIG) GPUs, CUDA shows a process only one part: the first one listed.
        """
        return {VISIBLE: self.gpu} if self.gpu is not None and self.gpu.startswith("MIG-") else {}


def assignments(context: TaskContext, ranks: int) -> list[Assignment]:
    """What each rank of a task has been assigned.

    Args:
        context: the task's context.
        ranks: ranks per task.
    """
    found = context.resources().get("gpu")
    # In numerical order, the order in which torchrun assigns them.
    gpus = sorted(found.addresses, key=lambda each: (len(each), each)) if found else [None] * ranks
    return [
        Assignment(
            rank=context.partitionId() * ranks + index,
            task=context.partitionId(),
            attempt=context.taskAttemptId(),
            cores=max(1, context.cpus() // ranks),
            gpu=gpus[index],
            of_task=tuple(gpus[:ranks]),
        )
        for index in range(ranks)
    ]


def first_gpu(context: TaskContext) -> str | None:
    """The address of a GPU that Spark has assigned to a task; None if it has assigned none."""
    return assignments(context, 1)[0].gpu


def run_ranks(
    entry: str,
    payload: SentBytes,
    arguments: tuple[Any, ...],
    ranks: int,
    apart: bool,
    shipment: tuple[Any, ...] | None,
    versions: dict[str, str],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Run a worker's function for every rank of this task.

    Args:
        entry: ``module:function``, called with the payload's bytes, ``*arguments``, an
            ``Assignment`` and the rank's rows; returns bytes, or None if it has failed, of which
            others know.
        payload: its first argument.
        arguments: plain values.
        ranks: ranks per task.
        apart: whether the only rank of a task gets a process of its own too.
        shipment: the fields of a ``Shipment``, the user's own modules; None for none.
        versions: the versions of the packages that a rank needs; see ``bootstrap.require``.
        batches: the task's rows, packed.

    Yields:
        What the function yields for all ranks.
    """
    arguments = (payload.value, *arguments)
    batches = given_rows(batches)
    context = TaskContext.get()
    assert context is not None
    assigned = assignments(context, ranks)
    arrived = arrive(None if shipment is None else Shipment(*shipment))
    if ranks == 1 and not apart and assigned[0].environment.items() <= os.environ.items():
        require(versions)
        with importable(arrived):
            yield _worked(entry, arguments, assigned[0], batches)
        return
    yielded = hosted(entry, arguments, assigned, arrived, versions, batches)
    with importable(arrived):  # a class of the user's may say how an accumulator adds
        yield from counted(yielded)


def hosted(
    entry: str,
    arguments: tuple[Any, ...],
    assigned: Sequence[Assignment],
    arrived: Arrived,
    versions: dict[str, str],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Run a worker's function for ranks of this task, each in a process of its own.

    Args:
        entry: as in ``run_ranks``.
        arguments: as in ``run_ranks``.
        assigned: what each of the ranks has been assigned.
        arrived: the user's own modules.
        versions: as in ``run_ranks``.
        batches: their rows.

    Returns:
        What the function yields for all ranks, and what was added to accumulators.
    """
    context = TaskContext.get()
    assert context is not None
    surroundings = SparkFiles.getRootDirectory(), context
    return host_ranks(
        [
            RankCall(
                rank=each.rank,
                entry=f"{__name__}:run_rank",
                arguments=(versions, surroundings, arrived, entry, arguments, each),
                environment=each.environment,
            )
            for each in assigned
        ],
        batches,
    )


def given_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A task's rows from Spark, unpacked."""
    return map(unpacked, _delivered(batches))


def _delivered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows from Spark.

    Raises:
        RowsLostError: they broke off. What computes them has failed, and Python only sees the end
            of its input.
    """
    try:
        yield from batches
    except Exception as error:
        raise RowsLostError(f"the rows from Spark broke off: {message_of(error)}") from error


def run_rank(
    versions: dict[str, str],
    surroundings: tuple[str, TaskContext],
    arrived: Arrived,
    entry: str,
    arguments: tuple[Any, ...],
    assigned: Assignment,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Run the function in a rank's process, where PySpark is to work as it does in the task's.

    Args:
        versions: as in ``run_ranks``.
        surroundings: what PySpark keeps in the task's process.
        arrived: the user's own modules.
        entry: as in ``run_ranks``.
        arguments: as in ``run_ranks``.
        assigned: what the rank has been assigned.
        batches: the rank's rows.

    Yields:
        What the function yields, then what it has added to accumulators.
    """
    require(versions)
    restore(*surroundings)
    with importable(arrived):
        yield (worked := _worked(entry, arguments, assigned, batches))
        if not worked["result"].null_count:  # it has done what it should
            yield from added_here()


def _worked(
    entry: str, arguments: tuple[Any, ...], assigned: Assignment, batches: Iterator[pa.RecordBatch]
) -> pa.RecordBatch:
    """Call a rank's function; returns the rank with what that returned."""
    write_threads_on_signal()
    module, name = entry.split(":")
    function = getattr(importlib.import_module(module), name)
    with interrupted_by_signals_alone():
        result = function(*arguments, assigned, batches)
    columns = [pa.array([assigned.rank]), pa.array([result], pa.binary())]
    return pa.record_batch(columns, OUTPUT_SCHEMA)
