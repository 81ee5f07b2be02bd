"""How long an epoch takes with rounds that are cut off, on hosts that really are slow, for spells.

Four workers and the driver, each on a host of its own (``linked_hosts.py``; needs root). In each
half second every worker's host is slow with a probability of a quarter: three of them are then
stopped for seven eighths of the time, in slices of 40 ms, as is a host whose cores others take; and
the fourth has a link of 40 Mbit/s in place of 1 Gbit/s. All contenders meet with the same spells. A
step sleeps in place of computing, because the hosts share the cores of this machine, but a
millisecond at a time, so that a host that is stopped gets no further.

Every row is trained on in any case, and late contributions are in the next round.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from linked_hosts import LinkedHosts, Trial
from torch import Tensor, nn

from sparkdl.feed.columns import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.strategies.cutoff import Cutoff
from sparkdl.testing import batches_of
from sparkdl.worker import Job

WORKERS, PERIOD, BATCH, SLICES = 4, 5, 8, 5
"""A step takes so many times a millisecond and a little."""
FEATURES, CLASSES = 1000, 100
SPELL_S, PROBABILITY = 0.5, 0.25
CYCLE_S, STOPPED_S = 0.04, 0.035
MBIT, SLOW_MBIT = 1000.0, 40.0
EPOCHS = 4
CUTOFFS: dict[str, Cutoff] = {"everyone": "none", "one backup worker": 1, "predicted": "predicted"}


def main() -> None:
    """Runs all, and reports."""
    chosen = harness.arguments(__doc__, repeats=3)
    windows = 10 if chosen.quick else 50
    with (
        tempfile.TemporaryDirectory() as folder,
        LinkedHosts(WORKERS, Path(folder)) as hosts,
    ):
        hosts.limit(MBIT)
        trained = partial(epochs, hosts, shards(windows, Path(folder)))
        steady = harness.show("no host slow, everyone: an epoch", trained("none", seed=None))
        runs: dict[str, list[float]] = {name: [] for name in CUTOFFS}
        for seed in range(chosen.repeats):
            for name, cutoff in CUTOFFS.items():
                runs[name] += trained(cutoff, seed=seed)
    seconds = {
        name: harness.show(f"slow for spells, {name}: an epoch", run, digits=2)
        for name, run in runs.items()
    }
    claims = [
        harness.Claim(
            name=f"hosts slow for spells: seconds an epoch, {name} / {other}",
            ratio=seconds[name] / seconds[other],
            target=target,
        )
        for name, other, target in [
            ("predicted", "everyone", 0.8),
            ("one backup worker", "everyone", 0.8),
            ("predicted", "one backup worker", 1.05),
        ]
    ]
    means = {name: round(statistics.mean(run), 2) for name, run in runs.items()}
    print(f"mean seconds of an epoch: {means}")
    measured = {"epoch_s": seconds, "mean_epoch_s": means, "nobody_slow_epoch_s": steady}
    harness.report("cutoff_hosts", claims, measured)


class Sleeps(nn.Module):
    """A linear model of 100,100 parameters, whose forward pass takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Sleep, then compute."""
        for _ in range(SLICES):
            time.sleep(0.001)
        return self.linear(features)


def shards(windows: int, folder: Path) -> list[Path]:
    """Rows of so many windows for each worker, in a file."""
    draw, rows, paths = np.random.default_rng(0), windows * PERIOD * BATCH, []
    for rank in range(WORKERS):
        features = draw.normal(size=(rows, FEATURES)).astype(np.float32)
        label = features[:, :CLASSES].argmax(axis=1)
        paths.append(folder / f"shard-{rank}")
        paths[-1].write_bytes(pickle.dumps(batches_of(rows, features=features, label=label)))
    return paths


def epochs(
    hosts: LinkedHosts, rows: list[Path], cutoff: Cutoff, *, seed: int | None
) -> list[float]:
    """Seconds of each epoch but the first, for which workers are sent the center.

    Args:
        hosts: the driver's and the workers'.
        rows: of each worker.
        cutoff: of the rounds.
        seed: of the spells; None for none.
    """
    job = Job(
        model=Sleeps,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        strategy=ParameterAveraging(PERIOD, cutoff=cutoff),
        schema=FeedSchema(
            features=(ColumnSpec("features", torch.float32, (FEATURES,)),),
            label=ColumnSpec("label", torch.int64),
        ),
        epochs=EPOCHS,
        batch_size=BATCH,
        seed=1,
        deadline_s=120.0,
    )
    held_out = torch.zeros(1, FEATURES), torch.zeros(1, dtype=torch.int64)
    with contextlib.nullcontext() if seed is None else spells(hosts, seed):
        points = hosts.train(Trial(job, rows, held_out)).points
    took = [after.seconds - before.seconds for before, after in pairwise(points[1:])]
    told = ", ".join(f"{each:.2f}" for each in took)
    print(f"seed {seed}, cutoff {cutoff}: {told} s", flush=True)
    return took


@contextmanager
def spells(hosts: LinkedHosts, seed: int) -> Iterator[None]:
    """Have the workers' hosts slow now and then, until the end."""
    over = threading.Event()
    thread = threading.Thread(target=_slow_down, args=(hosts.workers, random.Random(seed), over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _slow_down(workers: list[Any], draw: random.Random, over: threading.Event) -> None:
    *stopped, linked = workers
    begins = time.monotonic()
    while not over.is_set():
        slow = [host for host in stopped if draw.random() < PROBABILITY]
        if draw.random() < PROBABILITY:
            linked.limit(SLOW_MBIT, burst_kb=16)
        pids = [pid for host in slow for pid in host.pids()]
        begins += SPELL_S
        while time.monotonic() < begins and not over.is_set():
            _signal(pids, signal.SIGSTOP)
            over.wait(STOPPED_S)
            _signal(pids, signal.SIGCONT)
            over.wait(CYCLE_S - STOPPED_S)
        linked.limit(MBIT, burst_kb=250)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
