"""What a worker of a fit does in its task: find its place, unpack the job, run the worker loop."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pyarrow as pa

from sparkdl.collective import Network
from sparkdl.process.interrupts import Interrupted
from sparkdl.process.lazy_compiler import defer_compiler
from sparkdl.process.randomness import streams_put_back
from sparkdl.spark.cluster.devices import choose_device
from sparkdl.spark.diagnostics.run_client import forwarded
from sparkdl.spark.launch.assignment import Assignment
from sparkdl.spark.rows.scratch import row_directory
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.worker import Job, Placement, report_failure, train


def run_worker_task(
    payload: bytes,
    address: tuple[str, int, str, str | None],
    assigned: Assignment,
    batches: Iterator[pa.RecordBatch],
) -> bytes | None:
    """Train one replica on one rank's rows.

    Args:
        payload: pickled: the ``Job``, the ``Network``, what demands that rows stay in memory, if
            anything does, the device (``auto``, ``cpu``, ``cuda`` or ``cuda:N``), and whether what
            is printed is also written to this process's own streams; what follows is for others.
        address: the fields of the ``ServiceAddress`` of the averager and the console.
        assigned: the rank, its cores and its GPU.
        batches: the rank's rows.

    Returns:
        Nothing in bytes, as everything goes through the averager; None if something went wrong.
    """
    rank, averager = assigned.rank, ServiceAddress(*address)
    defer_compiler()
    try:
        job: Job
        network: Network
        in_memory: str | None
        job, network, in_memory, device, echo, *_ = cloudpickle.loads(payload)
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
        return None
    # Spark will use this process for the user's other jobs.
    with streams_put_back(), forwarded(averager, rank, echo=echo):
        return b"" if train(job, placement, averager, batches) else None
