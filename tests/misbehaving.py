"""Workers that misbehave at a marked row, and launches of workers of one's own choosing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interruptions import Interrupted, dying_after
from torch import Tensor, nn
from toys import (
    SEED,
    Data,
    classification,
    mlp,
    permutation,
)

from sparkdl.averager import Averager
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome
from sparkdl.events import WindowReport
from sparkdl.testing import run_world
from sparkdl.worker import Job, Placement, train

MARK = 777.0
"""A feature value by which a model recognizes the row at which to misbehave."""


def marked(sizes: list[int], *places: int) -> Data:
    """Rows for the ranks, some marked by their places in epoch 1, all ranks' counted through."""
    data = classification(sizes)
    starts = np.cumsum([0, *sizes])
    epoch_one = np.concatenate(
        [
            start + permutation(size, seed=SEED, epoch=1, rank=rank).numpy()
            for rank, (start, size) in enumerate(zip(starts[:-1], sizes, strict=True))
        ]
    )
    data.features[epoch_one[list(places)], 0] = MARK
    return data


class Marked(nn.Module):
    """Does something at the marked row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, features: Tensor) -> Tensor:
        if (features[:, 0] == MARK).any():
            self.at_mark()
        return self.net(features)

    def at_mark(self) -> None:
        raise NotImplementedError


class Raises(Marked):
    def at_mark(self) -> None:
        raise ZeroDivisionError("the user's own mistake")


class Kills(Marked):
    def at_mark(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class KillsOnce(nn.Module):
    """Kills the process of rank 1 in one of all passes that its processes make.

    Args:
        folder: an empty one, in which the passes are counted.
        after: how many passes go well.
    """

    def __init__(self, folder: Path, after: int) -> None:
        super().__init__()
        self.net = mlp()
        self.folder, self.after = str(folder), after

    def forward(self, features: Tensor) -> Tensor:
        if "rank 1" in multiprocessing.current_process().name:
            passes = len(os.listdir(self.folder))
            Path(self.folder, str(passes)).touch()
            if passes == self.after:
                os.kill(os.getpid(), signal.SIGKILL)
        outputs: Tensor = self.net(features)
        return outputs


def die_after(
    windows: int, job: Job, shards: Any, policy: CheckpointPolicy, ranks_as: Any = "threads"
) -> None:
    """Run until so many windows were committed, and no further."""
    with pytest.raises(Interrupted), dying_after(windows) as on_event:
        run_world(job, shards, ranks_as=ranks_as, checkpoints=policy, on_event=on_event)


def resume_after(
    windows: int, job: Job, shards: Any, folder: Path, ranks_as: Any = "threads"
) -> Outcome:
    """What comes of a run that dies after so many windows, and then goes on from there."""
    policy = CheckpointPolicy(path=str(folder / "c"), every_rounds=1)
    die_after(windows, job, shards, policy, ranks_as)
    seen: list[object] = []
    outcome = run_world(job, shards, ranks_as=ranks_as, checkpoints=policy, on_event=seen.append)
    again = sum(event.examples for event in seen if isinstance(event, WindowReport))
    assert 0 < again < sum(row.examples for row in outcome.history)
    return outcome


def kill_once(job: Job, shards: Any) -> Outcome:
    """What comes of a run whose model is a ``KillsOnce``: all rows are counted once an epoch."""
    outcome = run_world(job, shards, ranks_as="processes")
    model = job.model()
    assert isinstance(model, KillsOnce)
    assert len(os.listdir(model.folder)) > model.after
    rows = sum(batch.num_rows for shard in shards for batch in shard)
    assert [row.examples for row in outcome.history] == [rows] * job.epochs
    return outcome


class Overflows(Marked):
    def at_mark(self) -> None:
        with torch.no_grad():
            next(self.parameters()).view(-1)[:3] = float("inf")


@contextmanager
def started(workers: list[threading.Thread], wait_s: float) -> Iterator[None]:
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.join(wait_s)
        assert not any(worker.is_alive() for worker in workers)


def ranks(
    job: Job, shards: Any, wanted: dict[int, int], averagers: list[Averager] | None = None
) -> Any:
    """Launch threads of our own choosing: {shard: rank it claims}."""

    def launch(averager: Averager) -> Any:
        if averagers is not None:
            averagers.append(averager)
        workers = [
            threading.Thread(
                target=train,
                args=(
                    job,
                    Placement(rank=rank, directory=Path("/tmp")),
                    averager.address,
                    shards[s],
                ),
                name=f"sparkdl-rank-{rank}",
                daemon=True,
            )
            for s, rank in wanted.items()
        ]
        return started(workers, 20)

    return launch
