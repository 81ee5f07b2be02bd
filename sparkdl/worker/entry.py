"""A worker from start to end: it builds its replica, joins the averager and trains.

A worker is a function of (job, averager's address, iterator of record batches); it knows nothing
about Spark. The algorithm itself is in ``loop``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pyarrow as pa
import torch

from sparkdl.averager.client.client import AveragerClient
from sparkdl.errors import (
    CollectiveError,
    DeadlineError,
    DisconnectedError,
    RowsLostError,
    StoppedError,
)
from sparkdl.phases import PhaseClock
from sparkdl.process.interrupts import Interrupted
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.replica import Replica
from sparkdl.strategies.base import Run
from sparkdl.strategies.on_worker import OnWorker
from sparkdl.transport.address import ServiceAddress
from sparkdl.worker.failures import as_worker_error, report_failure, where_of
from sparkdl.worker.job import Job, Placement
from sparkdl.worker.links import WorkerLinks
from sparkdl.worker.loop import TrainingLoop
from sparkdl.worker.state import checkpointed_state, restart_state
from sparkdl.worker_callback import StepCalls

logger = logging.getLogger(__name__)


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
    torch.set_num_threads(placement.threads)
    with job.settings.hold():
        try:
            replica = _build_replica(job, placement)
        except Interrupted:
            raise
        except BaseException as error:  # whatever the user's code raises must reach the driver
            report_failure(address, placement.rank, error)
            return False
        return _join_and_train(job, placement, replica, address, batches)


def _build_replica(job: Job, placement: Placement) -> Replica:
    # Seeded like the driver: parameters that are never trained come only from here.
    with borrowed_random_numbers(job.seed):
        return Replica(
            job.model(),
            job.optimizer,
            job.loss,
            placement.device,
            clip_norm=job.clip_norm,
            precision=job.precision,
            scheduler=job.scheduler,
            scheduler_every=job.scheduler_every,
            features_as_kwargs=job.features_as_kwargs,
        )


def _join_and_train(
    job: Job,
    placement: Placement,
    replica: Replica,
    address: ServiceAddress,
    batches: Iterable[pa.RecordBatch],
) -> bool:
    clock, rank = PhaseClock(), placement.rank
    strategy = OnWorker(job.strategy)
    joined = False
    try:
        with AveragerClient(
            address,
            rank,
            job.strategy.wire_format,
            deadline_s=job.deadline_s,
            worker_state=lambda: checkpointed_state(replica, job.strategy, strategy.saved_state()),
            fragments=job.strategy.fragments,
            attempt=placement.attempt,
            task=placement.task,
            restart_state=(
                (lambda: restart_state(replica, job.strategy, strategy.saved_state()))
                if job.resubmissions
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
                TrainingLoop(job, placement, run, strategy, averager, links).train(batches)
                return True
            except (StoppedError, DeadlineError, Interrupted):
                raise
            except CollectiveError as error:
                told = f"{where_of(rank, run)}: {error}"
                averager.report_failure(CollectiveError(told, ranks=error.ranks))
            except BaseException as error:  # as above
                averager.report_failure(as_worker_error(error, rank, run))
    except (StoppedError, DeadlineError) as error:
        if isinstance(error, RowsLostError):
            raise
        if isinstance(error, DisconnectedError) and (job.survivable_losses or not joined):
            raise
        # The averager ended the run and knows why, or is gone; raising would make Spark retry.
        logger.info("rank %d leaves: %s", rank, error)
    return False
