"""How long an epoch takes with rounds that are cut off, on hosts that really are slow in spells.

Eight workers and the driver, each on a host of its own (``linked_hosts.py``; needs root). Hosts are
slow as in the noise of ``cutoff.py``: a quarter of the time, in spells of 20 usual windows on
average, and about four times as slow (``spells.py``). Seven are stopped for three quarters of such
a spell, in slices of 40 ms, like a host whose cores others take; the eighth has a link of 20 Mbit/s
instead of 1 Gbit/s. All contenders face the same spells. A step sleeps instead of computing,
because the hosts share the cores of this machine, but a millisecond at a time, so that a stopped
host makes no progress.

Every row is trained on in any case, and late contributions go into the next round. Epochs are so
long that each host has several spells in one: in short epochs all wait for the unluckiest host in
the end, whoever is waited for before. ``cutoff_epochs.py`` replays this in virtual time.
"""

import contextlib
import os
import pickle
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
from spells import Spells
from torch import Tensor, nn

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.strategies.arguments import Cutoff
from sparkdl.testing import batches_of
from sparkdl.worker import Job

WORKERS, PERIOD, BATCH, SLICES = 8, 5, 8, 15
"""A step takes ``SLICES`` times a little more than a millisecond."""
WINDOW_S = 0.13
"""Seconds of a window with its round when no host is slow."""
FEATURES, CLASSES = 1000, 100
CYCLE_S, STOPPED_S = 0.04, 0.03
MBIT, SLOW_MBIT = 1000.0, 20.0
EPOCHS = 2
CUTOFFS: dict[str, Cutoff] = {
    "everyone": "none",
    "one backup worker": 1,
    "two backup workers": 2,
    "predicted": "predicted",
}
"""By name; on average two hosts are slow."""


def main() -> None:
    """Runs all, and reports."""
    chosen = harness.arguments(__doc__, repeats=3)
    windows = 10 if chosen.quick else 150
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
            ("two backup workers", "everyone", 0.8),
            ("predicted", "one backup worker", 1.05),
            ("predicted", "two backup workers", 1.05),
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
    """The rows of each worker for ``windows`` windows, in files."""
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
    """Seconds of each epoch.

    Args:
        hosts: the driver's and the workers'.
        rows: the file with each worker's rows.
        cutoff: the cut-off of the rounds.
        seed: the seed of the spells; None for no spells.
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
    with contextlib.nullcontext() if seed is None else slowed(hosts, seed):
        points = hosts.train(Trial(job, rows, held_out)).points
    took = [after.seconds - before.seconds for before, after in pairwise(points)]
    told = ", ".join(f"{each:.2f}" for each in took)
    print(f"seed {seed}, cutoff {cutoff}: {told} s", flush=True)
    return took


@contextmanager
def slowed(hosts: LinkedHosts, seed: int) -> Iterator[None]:
    """Make the workers' hosts slow now and then within the context."""
    over = threading.Event()
    spells = Spells(WORKERS, seed, WINDOW_S)
    thread = threading.Thread(target=_slow_down, args=(hosts.workers, spells, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _slow_down(workers: list[Any], spells: Spells, over: threading.Event) -> None:
    *stopped, linked = workers
    begins, is_limited = time.monotonic(), False
    while not over.is_set():
        now = time.monotonic() - begins
        slow = [host for place, host in enumerate(stopped) if spells.is_slow(place, now)]
        if spells.is_slow(len(stopped), now) != is_limited:
            is_limited = not is_limited
            linked.limit(SLOW_MBIT if is_limited else MBIT, burst_kb=16 if is_limited else 250)
        pids = [pid for host in slow for pid in host.pids()]
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
