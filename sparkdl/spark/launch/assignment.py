"""What Spark has assigned to the ranks of a task, and the start of a process for each if several.

A task with one GPU or none is one rank, trained in Spark's own Python process. A task with several
GPUs (``spark.task.resource.gpu.amount``) is as many ranks, each in a process of its own.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import SparkFiles, TaskContext

from sparkdl.feed.packed import unpacked
from sparkdl.spark.cluster.devices import VISIBLE
from sparkdl.spark.launch.rank_host import RankCall, host_ranks


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What one rank has.

    Attributes:
        rank: its number; those of one task follow each other.
        task: the number of its task.
        attempt: of the task.
        cores: how many.
        gpu: the address of its GPU, as Spark says it; None if Spark has assigned none.
    """

    rank: int
    task: int
    attempt: int
    cores: int
    gpu: str | None

    @property
    def environment(self) -> dict[str, str]:
        """What has to be set in a process before it first uses CUDA.

        Of GPUs that are split (MIG) CUDA shows a process one part, the first that is listed.
        """
        return {VISIBLE: self.gpu} if self.gpu is not None and self.gpu.startswith("MIG-") else {}


def assignments(context: TaskContext, ranks: int) -> list[Assignment]:
    """What each rank of a task has.

    Args:
        context: the task's.
        ranks: how many ranks every task is.
    """
    found = context.resources().get("gpu")
    # In the order of their numbers, as torchrun gives them out.
    gpus = sorted(found.addresses, key=lambda each: (len(each), each)) if found else [None] * ranks
    return [
        Assignment(
            rank=context.partitionId() * ranks + index,
            task=context.partitionId(),
            attempt=context.taskAttemptId(),
            cores=max(1, context.cpus() // ranks),
            gpu=gpus[index],
        )
        for index in range(ranks)
    ]


def first_gpu(context: TaskContext) -> str | None:
    """The address of a GPU that Spark has assigned to a task; None if it has assigned none."""
    return assignments(context, 1)[0].gpu


def run_ranks(
    entry: str, arguments: tuple[Any, ...], ranks: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run a worker's function for every rank of this task.

    Args:
        entry: ``module:function``, called with ``*arguments``, an ``Assignment`` and the rank's
            rows; yields record batches.
        arguments: plain values.
        ranks: how many ranks every task is.
        batches: the task's rows, packed.

    Yields:
        What the function does for all ranks.
    """
    batches = map(unpacked, batches)
    context = TaskContext.get()
    assert context is not None
    assigned = assignments(context, ranks)
    if ranks == 1 and assigned[0].environment.items() <= os.environ.items():
        yield from _function(entry)(*arguments, assigned[0], batches)
        return
    files = SparkFiles.getRootDirectory()
    yield from host_ranks(
        [
            RankCall(
                rank=each.rank,
                entry=f"{__name__}:run_rank",
                arguments=(files, entry, arguments, each),
                environment=each.environment,
            )
            for each in assigned
        ],
        batches,
    )


def run_rank(
    files: str,
    entry: str,
    arguments: tuple[Any, ...],
    assigned: Assignment,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Do the same in the process of one rank, where ``SparkFiles`` is to work as in the task's.

    Args:
        files: where Spark keeps what the user has added to the session.
        entry: as in ``run_ranks``.
        arguments: as in ``run_ranks``.
        assigned: the rank's.
        batches: the rank's rows.

    Yields:
        What the function does.
    """
    SparkFiles._root_directory, SparkFiles._is_running_on_worker = files, True
    yield from _function(entry)(*arguments, assigned, batches)


def _function(entry: str) -> Callable[..., Iterator[pa.RecordBatch]]:
    module, name = entry.split(":")
    function: Callable[..., Iterator[pa.RecordBatch]] = getattr(
        importlib.import_module(module), name
    )
    return function
