"""What a worker's Spark task does: find its place, unpack the job, run the worker loop."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pyarrow as pa
from pyspark import TaskContext

from sparkdl.averager.server import AveragerAddress
from sparkdl.collective import Network
from sparkdl.spark.board import BoardAddress
from sparkdl.spark.console import forwarded
from sparkdl.spark.devices import choose_device
from sparkdl.worker import Job, Place, report_failure, train

OUTPUT_SCHEMA = pa.schema([pa.field("rank", pa.int64(), nullable=False)])
OUTPUT_DDL = "rank bigint"


def run_worker_task(
    payload: bytes,
    uri: str,
    token: str,
    device: str,
    console: tuple[str, int, str],
    echo: bool,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Train one replica on this task's partition.

    Args:
        payload: the pickled ``Job`` and ``Network``.
        uri: where the averager is.
        token: the job's token.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        console: the fields of the console's ``BoardAddress``.
        echo: whether what is printed is also written to this process's own streams.
        batches: the partition's rows.

    Yields:
        One record batch with the rank; everything else travels by the averager.
    """
    context = TaskContext.get()
    assert context is not None
    rank, address = context.partitionId(), AveragerAddress(uri, token)
    try:
        job: Job
        network: Network
        job, network = cloudpickle.loads(payload)
        place = Place(
            rank=rank,
            device=choose_device(device, context),
            threads=context.cpus(),
            directory=_local_directory(),
            attempt=context.taskAttemptId(),
            network=network,
        )
    except Exception as error:  # an import missing on this executor is the user's to see
        report_failure(address, rank, error)
    else:
        with forwarded(BoardAddress(*console), rank, echo=echo):
            train(job, place, address, batches)
    yield pa.record_batch([pa.array([rank])], schema=OUTPUT_SCHEMA)


def _local_directory() -> Path:
    """Spark's scratch directory on this host, which Spark empties when the executor ends."""
    for directory in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):
        if directory and os.path.isdir(directory):
            return Path(directory)
    return Path(tempfile.gettempdir())
