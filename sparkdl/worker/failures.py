"""What the driver is told about an error on a worker: the place, the traceback, the remedy."""

from __future__ import annotations

import logging

import torch

from sparkdl.averager.client.worker_channel import WorkerChannel
from sparkdl.averager.messages.headers import failure_header
from sparkdl.errors import (
    DeadlineError,
    DisconnectedError,
    NonFiniteError,
    StoppedError,
    TrainingError,
    WorkerError,
)
from sparkdl.strategies.base import Run
from sparkdl.transport.address import ServiceAddress
from sparkdl.transport.connecting import reach
from sparkdl.user_code.missing_modules import advice
from sparkdl.user_code.tracebacks import (
    TRACEBACK_CHARACTERS,
    message_of,
    text_of,
    traceback_of,
)

logger = logging.getLogger(__name__)

START_FAILURE_S = 60.0
"""Seconds for which a worker that could not start tries to reach the averager, and waits for it."""


def report_failure(address: ServiceAddress, rank: int, error: BaseException) -> None:
    """End the run from a worker that could not even start.

    Args:
        address: the driver's averager.
        rank: the worker's rank.
        error: why it could not start.

    Raises:
        DisconnectedError: the averager cannot be reached; ``error`` is its cause.
    """
    failure = failure_header(as_worker_error(error, rank, None))
    try:
        channel = reach(lambda: WorkerChannel(address, rank, START_FAILURE_S), START_FAILURE_S)
        try:
            channel.send_last(failure)
        finally:
            channel.close()
    except DisconnectedError as unreachable:
        raise unreachable from error
    except (StoppedError, DeadlineError) as answer:
        logger.info("rank %d leaves: %s", rank, answer)


def as_worker_error(error: BaseException, rank: int, run: Run | None) -> WorkerError:
    """An error that says where it happened, with the worker's own traceback."""
    if isinstance(error, NonFiniteError):
        return error
    epoch, step = _when(run)
    where = where_of(rank, run)
    own = isinstance(error, TrainingError)
    if own:
        text, message = "", f"{where}: {text_of(error, TRACEBACK_CHARACTERS)}"
    else:
        text = traceback_of(error)
        message = f"{where}: {message_of(error)}{_advice(error)}\n\n{text}"
    return WorkerError(message, rank=rank, epoch=epoch, step=step, worker_traceback=text)


def where_of(rank: int, run: Run | None) -> str:
    """A worker and its progress, in words."""
    epoch, step = _when(run)
    return f"rank {rank}, epoch {epoch}, step {step}"


def _when(run: Run | None) -> tuple[int, int]:
    return (run.epoch, run.step) if run is not None else (0, 0)


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
            "batchSize or memoryBudget"
        )
    return ""
