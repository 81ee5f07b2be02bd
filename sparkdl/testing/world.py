"""A whole run on one machine without Spark: the real averager, the real worker loop."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import cloudpickle
import numpy as np
import pyarrow as pa

from sparkdl.averager.rounds import Event
from sparkdl.averager.server import Averager, AveragerAddress
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Launch, Outcome, run
from sparkdl.errors import TrainingError, WorkerLostError
from sparkdl.worker import Job, Place, train

Shard = Sequence[pa.RecordBatch]


def batches_of(rows_a_batch: int, **columns: np.ndarray) -> list[pa.RecordBatch]:
    """Cut numpy arrays into record batches as Spark would hand them over.

    Args:
        rows_a_batch: rows of each record batch; the last may have fewer.
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
    checkpoints: CheckpointPolicy | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Train ``job`` with one worker a shard and return the outcome.

    Args:
        job: what to train.
        shards: the rows of each rank.
        ranks_as: threads are quick to start; processes are what Spark uses.
        checkpoints: where to write checkpoints and whether to go on from one.
        on_event: called for the data's facts and each window and epoch reported.

    Raises:
        TrainingError: as ``TorchEstimator.fit`` would.
    """
    launch = _threads if ranks_as == "threads" else _processes
    with tempfile.TemporaryDirectory(prefix="sparkdl-testing-") as directory:
        return run(
            job,
            len(shards),
            launch(job, shards, Path(directory)),
            checkpoints=checkpoints,
            on_event=on_event,
        )


def _threads(job: Job, shards: Sequence[Shard], directory: Path) -> Launch:
    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        workers = [
            threading.Thread(
                target=train,
                args=(job, Place(rank=rank, directory=directory), averager.address, shard),
                name=f"sparkdl-rank-{rank}",
                daemon=True,
            )
            for rank, shard in enumerate(shards)
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


def _processes(job: Job, shards: Sequence[Shard], directory: Path) -> Launch:
    context = multiprocessing.get_context("spawn")
    payload = cloudpickle.dumps(job)

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        workers = [
            context.Process(
                target=_train_in_process, args=(payload, rank, directory, averager.address, shard)
            )
            for rank, shard in enumerate(shards)
        ]
        for worker in workers:
            worker.start()
        watcher = threading.Thread(target=_watch, args=(workers, averager), daemon=True)
        watcher.start()
        try:
            yield
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        finally:
            for worker in workers:
                worker.join(job.deadline_s)
            watcher.join(job.deadline_s)

    return launch


def _train_in_process(
    payload: bytes, rank: int, directory: Path, address: AveragerAddress, shard: Shard
) -> None:
    train(cloudpickle.loads(payload), Place(rank=rank, directory=directory), address, shard)


def _watch(workers: Sequence[multiprocessing.process.BaseProcess], averager: Averager) -> None:
    """Tell the averager of a process that ends with an error before it could join."""
    ranks = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    while ranks:
        for sentinel in multiprocessing.connection.wait(list(ranks)):
            rank = ranks.pop(sentinel)  # type: ignore[arg-type]
            workers[rank].join()
            if workers[rank].exitcode:
                averager.fail(
                    WorkerLostError(f"rank {rank} exited with code {workers[rank].exitcode}")
                )
