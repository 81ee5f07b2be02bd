"""Workers that misbehave at a marked row, and launches of workers of one's own choosing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interruptions
import numpy as np
import pytest
import torch
from by_keyword import run
from interruptions import Interrupted, dying_after
from support.faults import Proxy
from torch import Tensor, nn
from toys import SEED, Data, classification, mlp, permutation

from sparkdl.averager import Averager
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome
from sparkdl.events import WindowReport
from sparkdl.testing import _processes, _threads, run_world
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
        explode()


class Kills(Marked):
    def at_mark(self) -> None:
        kill()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def explode() -> None:
    raise ZeroDivisionError("the user's own mistake")


class Misbehaves(nn.Module):
    """Does ``deed`` in a pass of rank 1 behind the ``after``-th, forwards or in backward.

    Only ``times`` in all; passes are counted over all processes of the rank.

    Args:
        folder: an empty one, in which the passes are counted.
        deed: what is done.
        after: how many passes go well.
        times: how many then do not.
        backward: whether it is done in backward.
        net: layers that are trained, by default ``mlp()``.
    """

    def __init__(
        self,
        folder: Path,
        deed: Callable[[], None],
        after: int,
        times: int = 1,
        backward: bool = False,
        net: nn.Sequential | None = None,
    ) -> None:
        super().__init__()
        self.net = net or mlp()
        self.folder, self.deed, self.backward = str(folder), deed, backward
        self.due = range(after, after + times)

    def forward(self, features: Tensor) -> Tensor:
        inner = self.net[0](features)
        if "rank 1" in multiprocessing.current_process().name:
            passes = len(os.listdir(self.folder))
            Path(self.folder, f"{passes:05d}-{os.getpid()}").touch()
            if passes in self.due and not self.backward:
                self.deed()
            elif passes in self.due:
                # The gradients of the last layer are on their way by then.
                inner.register_hook(lambda _: self.deed())
        return self.net[1:](inner)


def passes_in(folder: Path) -> int:
    """How many passes rank 1 has begun."""
    return len(os.listdir(folder))


def die_after(
    windows: int, job: Job, shards: Any, policy: CheckpointPolicy, ranks_as: Any = "threads"
) -> None:
    """Run until so many windows were committed, and no further."""
    with pytest.raises(Interrupted), dying_after(windows) as on_event:
        run_world(job, shards, ranks_as=ranks_as, checkpoints=policy, on_event=on_event)


def resume_after(
    windows: int,
    job: Job,
    data: Data,
    folder: Path,
    ranks_as: Any = "threads",
    every_rounds: int | None = 1,
    stop: Callable[..., bool] = interruptions.die_after,
) -> Outcome:
    """What comes of a run that ends after so many windows, and then goes on from there.

    All rows are counted once an epoch, and some of them were trained on before.
    """
    path, launch = folder / str(windows), _processes if ranks_as == "processes" else _threads
    path.parent.mkdir(exist_ok=True)
    assert stop(job, data, path, windows, launch, every_rounds=every_rounds), windows
    seen: list[object] = []
    policy = interruptions.policy(path, every_rounds=every_rounds)
    how: Any = {"ranks_as": ranks_as, "checkpoints": policy}
    outcome = run_world(job, data.shards(), on_event=seen.append, **how)
    again = sum(event.examples for event in seen if isinstance(event, WindowReport))
    rows = sum(data.sizes)
    assert 0 < again < rows * job.epochs, windows
    assert [row.examples for row in outcome.history] == [rows] * job.epochs, windows
    return outcome


def kill_once(job: Job, shards: Any, **options: Any) -> Outcome:
    """What comes of a run whose model ``Misbehaves``: all rows are counted once an epoch."""
    outcome = run_world(job, shards, ranks_as="processes", **options)
    model = job.model()
    assert isinstance(model, Misbehaves)
    assert passes_in(Path(model.folder)) > model.due.start
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
        workers = []
        for shard, rank in wanted.items():
            place = Placement(rank=rank, directory=Path("/tmp"))
            of_rank = (job, place, averager.address, shards[shard])
            named: Any = {"name": f"sparkdl-rank-{rank}", "daemon": True}
            workers.append(threading.Thread(target=train, args=of_rank, **named))
        return started(workers, 20)

    return launch


def seen_through(proxy: Proxy, averager: Averager) -> Any:
    """The averager as workers see it who have to pass the proxy."""
    return SimpleNamespace(address=proxy.address, fail=averager.fail)


def run_with_breaks(
    job: Job, shards: Any, folder: Path, limits: Iterable[int]
) -> tuple[Outcome, Proxy]:
    """A run behind a proxy that breaks a connection after each of so many bytes."""
    proxies: list[Proxy] = []
    start = _threads(job, shards, folder)
    left = iter(limits)

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        with Proxy(averager.address, lambda: next(left, None)) as proxy:
            proxies.append(proxy)
            with start(seen_through(proxy, averager)):
                yield

    return run(job, len(shards), launch), proxies[0]
