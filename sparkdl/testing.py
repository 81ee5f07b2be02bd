"""A whole run on one machine without Spark: the real averager, the real worker loop."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import numpy as np
import pyarrow as pa

from sparkdl.averager.run_events import RunEvent as Event
from sparkdl.averager.service.server import Averager
from sparkdl.callbacks import Callback
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.collective import Network
from sparkdl.driver import Launch, Observers, Outcome, RunOptions, run
from sparkdl.errors import DisconnectedError, TrainingError, WorkerLostError
from sparkdl.process.lazy_compiler import defer_compiler
from sparkdl.replica.initial import WarmStart
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.worker import Job, Placement, train

__all__ = ["batches_of", "run_world"]

logger = logging.getLogger(__name__)

Shard = Sequence[pa.RecordBatch]


def batches_of(rows_a_batch: int, **columns: np.ndarray) -> list[pa.RecordBatch]:
    """Cut numpy arrays into record batches as Spark would hand them over.

    Args:
        rows_a_batch: rows per record batch; the last may have fewer.
        **columns: arrays of shape (n,) or (n, width), in the order of the feed's schema.
    """
    arrays = {
        name: pa.array(values)
        if values.ndim == 1
        else pa.ListArray.from_arrays(
            pa.array(np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)),
            pa.array(values.reshape(-1)),
        )
        for name, values in columns.items()
    }
    batches: list[pa.RecordBatch] = pa.table(arrays).to_batches(max_chunksize=rows_a_batch)
    return batches


def run_world(
    job: Job,
    shards: Sequence[Shard],
    *,
    ranks_as: Literal["threads", "processes"] = "threads",
    devices: Sequence[str] | None = None,
    hosts: Sequence[str] | None = None,
    checkpoints: CheckpointPolicy | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    callbacks: Sequence[Callback] = (),
    warm_start: WarmStart | None = None,
) -> Outcome:
    """Train ``job`` with one worker per shard and return the outcome.

    Args:
        job: what to train.
        shards: the rows of each rank.
        ranks_as: threads are quick to start; processes are what Spark uses, and are needed by
            strategies whose workers exchange among themselves.
        devices: where each rank's replica lives; all on the CPU by default.
        hosts: the host that each rank believes it runs on; all the same by default.
        checkpoints: where to write checkpoints and whether to go on from one.
        on_event: called for the data's statistics and each window and epoch reported.
        callbacks: as for ``driver.Observers``.
        warm_start: as for ``driver.RunOptions``.

    Raises:
        TrainingError: as ``TorchEstimator.fit`` would.
    """
    launch = _threads if ranks_as == "threads" else _processes
    with tempfile.TemporaryDirectory(prefix="sparkdl-testing-") as directory:
        return run(
            job,
            len(shards),
            launch(job, shards, Path(directory), devices, hosts),
            RunOptions(checkpoints=checkpoints, warm_start=warm_start),
            Observers(on_event=on_event, callbacks=callbacks),
        )


def _threads(job: Job, shards: Sequence[Shard], directory: Path, *where: Any) -> Launch:
    places = _places(len(shards), directory, *where)

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        workers = [
            threading.Thread(
                target=_train_in_thread,
                args=(job, placement, averager.address, shard),
                name=f"sparkdl-rank-{placement.rank}",
                daemon=True,
            )
            for placement, shard in zip(places, shards, strict=True)
        ]
        for worker in workers:
            worker.start()
        try:
            yield
        except BaseException as error:
            averager.fail(TrainingError(f"the driver left the run: {error}"))
            raise
        finally:
            for worker in workers:
                worker.join(job.deadline_s)

    return launch


def _places(
    world_size: int,
    directory: Path,
    devices: Sequence[str] | None = None,
    hosts: Sequence[str] | None = None,
) -> list[Placement]:
    on = devices or ["cpu"] * world_size
    networks = [Network(host=hosts[rank] if hosts else None) for rank in range(world_size)]
    return [
        Placement(rank=rank, directory=directory, device=on[rank], network=networks[rank])
        for rank in range(world_size)
    ]


def _train_in_thread(job: Job, placement: Placement, address: ServiceAddress, shard: Shard) -> None:
    """Run one rank, and start it again when it asks for that, as Spark would."""
    for attempt in range(1 + job.survivable_losses):
        try:
            train(job, replace(placement, attempt=attempt), address, shard)
            return
        except DisconnectedError as error:
            logger.info("attempt %d of rank %d ended: %s", attempt, placement.rank, error)


def _processes(job: Job, shards: Sequence[Shard], directory: Path, *where: Any) -> Launch:
    places = _places(len(shards), directory, *where)
    # Each rank is forked from a process that has imported everything; this one has threads. Arrow
    # imports pandas with its first array, which takes longer than most trainings of a test.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "pandas"])
    payload = cloudpickle.dumps(job)

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        workers: dict[int, multiprocessing.process.BaseProcess] = {}
        over = threading.Event()

        def start(rank: int, attempt: int) -> None:
            placement = replace(places[rank], attempt=attempt)
            workers[rank] = context.Process(
                target=_train_in_process,
                args=(payload, placement, averager.address, shards[rank]),
                name=f"rank {rank}",
            )
            workers[rank].start()

        def watch() -> None:
            """Start a rank again whose process ends with an error, as Spark does."""
            restarts, running = 0, set(workers)
            while running:
                ranks = {workers[rank].sentinel: rank for rank in running}
                for sentinel in multiprocessing.connection.wait(list(ranks)):
                    rank = ranks[sentinel]  # type: ignore[index]
                    workers[rank].join()
                    code = workers[rank].exitcode
                    if code and not over.is_set() and restarts < job.survivable_losses:
                        restarts += 1
                        start(rank, restarts)
                        continue
                    running.discard(rank)
                    if code and not over.is_set():
                        lost = f"rank {rank} exited with code {code}"
                        averager.fail(WorkerLostError(lost, ranks=(rank,)))

        for rank in range(len(shards)):
            start(rank, 0)
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        except BaseException:
            over.set()
            for worker in workers.values():
                worker.kill()
            raise
        finally:
            watcher.join(job.deadline_s)

    return launch


def _train_in_process(
    payload: bytes, placement: Placement, address: ServiceAddress, shard: Shard
) -> None:
    # As under torchrun: Linux divides the cores among sessions first, and the threads of several
    # ranks in one session would keep each other waiting.
    os.setsid()
    defer_compiler()
    train(cloudpickle.loads(payload), placement, address, shard)
