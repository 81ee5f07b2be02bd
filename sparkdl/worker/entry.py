"""A worker from start to end: it builds its replica, joins the averager and trains.

A worker is a function of (job, averager's address, iterator of record batches); it knows nothing
about Spark. The algorithm itself is in ``loop``. Of an error on a worker, the driver is told
the place, the traceback and the remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial

import pyarrow as pa
import torch

from sparkdl.averager.client import AveragerClient
from sparkdl.averager.headers import failure_header
from sparkdl.errors import (
    CollectiveError,
    DeadlineError,
    DisconnectedError,
    NonFiniteError,
    RowsLostError,
    StoppedError,
    TrainingError,
    WorkerError,
)
from sparkdl.phases import PhaseClock
from sparkdl.process.interrupts import Interrupted
from sparkdl.process.torch_settings import large_blocks_given_back
from sparkdl.replica import Replica
from sparkdl.strategies.base import Run
from sparkdl.transport.connecting import ServiceAddress, reach
from sparkdl.user_code.needed_modules import advice
from sparkdl.user_code.tracebacks import (
    TRACEBACK_CHARACTERS,
    message_of,
    text_of,
    traceback_of,
)
from sparkdl.worker.job import Job, Placement
from sparkdl.worker.links import WorkerLinks
from sparkdl.worker.loop import TrainingLoop
from sparkdl.worker.state import checkpointed_state, restart_state
from sparkdl.worker_callback import StepCalls

logger = logging.getLogger(__name__)

START_FAILURE_S = 60.0
"""Seconds for which a worker that could not start tries to reach the averager, and waits for it."""


def train(
    job: Job, placement: Placement, address: ServiceAddress, batches: Iterable[pa.RecordBatch]
) -> bool:
    """Train one replica from the first epoch to the last.

    Args:
        job: what to train.
        placement: where this worker runs.
        address: the driver's averager's.
        batches: the worker's rows, once; exhausted before the first epoch, or in it.

    Returns:
        Whether it was trained to the end; if not, the averager knows why.

    Raises:
        DisconnectedError: the averager could never be reached, and so does not know this worker; or
            it can no longer be reached, and the run survives that. Whatever started the worker
            should restart it, or report the error.
        RowsLostError: as ``batches`` raises it; the averager sees the worker leave.
    """
    sparing = large_blocks_given_back() if job.strategy.needs.shards_replica else nullcontext()
    with job.settings.hold(placement.threads), sparing:
        try:
            replica = job.replica(placement.device)
        except Interrupted:
            raise
        except BaseException as error:  # whatever the user's code raises must reach the driver
            report_failure(address, placement.rank, error)
            return False
        return _join_and_train(job, placement, replica, address, batches)


def _join_and_train(
    job: Job,
    placement: Placement,
    replica: Replica,
    address: ServiceAddress,
    batches: Iterable[pa.RecordBatch],
) -> bool:
    clock, rank = PhaseClock(), placement.rank
    joined = False
    try:
        with AveragerClient(
            address,
            rank,
            job.strategy.wire_format,
            deadline_s=job.deadline_s,
            worker_state=lambda: checkpointed_state(run, job.strategy),
            fragments=job.strategy.fragments,
            attempt=placement.attempt,
            task=placement.task,
            restart_state=(
                (lambda: restart_state(run, job.strategy, passed_on=job.max_workers is not None))
                if job.resubmissions or job.max_workers is not None
                else None
            ),
            frozen=replica.frozen.fingerprint,
            clock=clock,
        ) as averager:
            joined = True
            run = Run(rank, replica, averager, clock=clock)
            if job.callbacks:
                run.calls = StepCalls(job.callbacks, rank, replica)
            try:
                links = WorkerLinks(job, placement, averager, address.token)
                TrainingLoop(job, placement, run, averager, links).train(batches)
                return True
            except (StoppedError, DeadlineError, Interrupted):
                raise
            except CollectiveError as error:
                told = f"{where_of(rank, run.epoch, run.step)}: {error}"
                averager.report_failure(CollectiveError(told, ranks=error.ranks))
            except BaseException as error:  # as above
                averager.report_failure(as_worker_error(error, rank, run.epoch, run.step))
    except (StoppedError, DeadlineError) as error:
        if isinstance(error, RowsLostError):
            raise
        if isinstance(error, DisconnectedError) and (job.survivable_losses or not joined):
            raise
        # The averager ended the run and knows why, or is gone; raising would make Spark retry.
        logger.info("rank %d leaves: %s", rank, error)
    return False


def report_failure(address: ServiceAddress, rank: int, error: BaseException) -> None:
    """End the run from a worker that could not even start.

    Args:
        address: the driver's averager.
        rank: the worker's rank.
        error: why it could not start.

    Raises:
        DisconnectedError: the averager cannot be reached; ``error`` is its cause.
    """
    failure = failure_header(as_worker_error(error, rank))
    try:
        name = f"the averager at {address.uri}"
        connect = partial(address.connect, rank, name, START_FAILURE_S)
        reach(connect, START_FAILURE_S).send_last(failure)
    except DisconnectedError as unreachable:
        raise unreachable from error
    except (StoppedError, DeadlineError) as answer:
        logger.info("rank %d leaves: %s", rank, answer)


def as_worker_error(error: BaseException, rank: int, epoch: int = 0, step: int = 0) -> WorkerError:
    """An error that says where it happened, with the worker's own traceback."""
    if isinstance(error, NonFiniteError):
        return error
    where = where_of(rank, epoch, step)
    if isinstance(error, TrainingError):
        text, message = "", f"{where}: {text_of(error, TRACEBACK_CHARACTERS)}"
    else:
        text = traceback_of(error)
        message = f"{where}: {message_of(error)}{_advice(error)}\n\n{text}"
    return WorkerError(message, rank=rank, epoch=epoch, step=step, worker_traceback=text)


def where_of(rank: int, epoch: int, step: int) -> str:
    """A worker and its progress, in words."""
    return f"rank {rank}, epoch {epoch}, step {step}"


def _advice(error: BaseException) -> str:
    """What to do about a lack of memory or of a module; empty for other errors."""
    if isinstance(error, ModuleNotFoundError):
        return f"\n{advice(error)}"
    if isinstance(error, torch.OutOfMemoryError):
        return "\nThe GPU's memory is full: lower batchSize, or set precision='bf16'"
    # torch's CPU allocator has no error class of its own.
    if isinstance(error, MemoryError) or "can't allocate memory" in text_of(error):
        return (
            "\nThe worker ran out of memory: raise spark.executor.memoryOverhead (and "
            "spark.executor.pyspark.memory, which is the limit where it is set), or lower "
            "batchSize"
        )
    return ""
