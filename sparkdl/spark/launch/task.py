"""What a worker of a fit does in its task: find its place, unpack the job, run the worker loop."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pyarrow as pa

from sparkdl.collective import Network
from sparkdl.process.interrupts import Interrupted, interrupted_by_signals_alone
from sparkdl.process.lazy_compiler import defer_compiler
from sparkdl.process.randomness import streams_put_back
from sparkdl.spark.closures.accumulators import discard_added
from sparkdl.spark.cluster.devices import choose_device
from sparkdl.spark.diagnostics.run_client import forwarded
from sparkdl.spark.diagnostics.stacks import write_threads_on_signal
from sparkdl.spark.launch.assignment import Assignment
from sparkdl.spark.rows.scratch import row_directory
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.worker import Job, Placement, report_failure, train

OUTPUT_SCHEMA = pa.schema([pa.field("rank", pa.int64(), nullable=False)])
OUTPUT_DDL = "rank bigint"


def run_worker_task(
    payload: bytes,
    address: tuple[str, str, str | None],
    device: str,
    echo: bool,
    assigned: Assignment,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Train one replica on one rank's rows.

    Args:
        payload: the pickled ``Job``, ``Network``, and what demands that rows stay in memory, if
            anything does.
        address: the fields of the ``ServiceAddress`` of the averager and the console.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        echo: whether what is printed is also written to this process's own streams.
        assigned: the rank, its cores and its GPU.
        batches: the rank's rows.

    Yields:
        One record batch with the rank; everything else goes through the averager.
    """
    write_threads_on_signal()
    defer_compiler()
    with interrupted_by_signals_alone():
        if not _train(payload, ServiceAddress(*address), device, echo, assigned, batches):
            discard_added()
    yield pa.record_batch([pa.array([assigned.rank])], schema=OUTPUT_SCHEMA)


def _train(
    payload: bytes,
    averager: ServiceAddress,
    device: str,
    echo: bool,
    assigned: Assignment,
    batches: Iterator[pa.RecordBatch],
) -> bool:
    """Train, unless the job cannot be unpacked; returns whether it went well."""
    rank = assigned.rank
    try:
        job: Job
        network: Network
        in_memory: str | None
        job, network, in_memory = cloudpickle.loads(payload)
        placement = Placement(
            rank=rank,
            device=choose_device(device, assigned.gpu, rank),
            threads=assigned.cores,
            directory=row_directory(in_memory),
            attempt=assigned.attempt,
            task=assigned.task,
            network=network,
        )
    except Interrupted:
        raise
    except BaseException as error:  # the user has to see an import that this executor lacks
        report_failure(averager, rank, error)
        return False
    # Spark will use this process for the user's other jobs.
    with streams_put_back(), forwarded(averager, rank, echo=echo):
        return train(job, placement, averager, batches)
