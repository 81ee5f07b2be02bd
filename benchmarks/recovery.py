"""What checkpoints and a lost worker cost, and whether memory stays flat over a thousand rounds.

Four workers, each a process on this machine, train the network of the other benchmarks on made-up
digits. With and without a checkpoint an epoch they take turns; then one of the four is killed -9
halfway, and the cost is what the job took longer than without. Memory is the resident set of the
driver and of its workers, in the second hundred rounds and in the last of a thousand.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import cloudpickle
import numpy as np
import torch
from harness import Claim, arguments, interleave, report, show
from torch import nn

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.columns import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import batches_of, run_world
from sparkdl.testing.world import Shard
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORKERS = 4
ROWS = 24_000
EPOCHS = 6
PERIOD = 5
BATCH = 16
RESTART_S = 15.0
"""What a lost worker may cost beside its own window."""


def network() -> nn.Module:
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def job(epochs: int, period: int = PERIOD, rows_a_batch: int = BATCH) -> Job:
    return Job(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        strategy=ParameterAveraging(period),
        schema=FeedSchema(
            (ColumnSpec("features", torch.float32, (784,)),), ColumnSpec("label", torch.int64)
        ),
        epochs=epochs,
        batch_size=rows_a_batch,
        seed=1,
        deadline_s=120.0,
        max_failures=3,
    )


def shards(rows: int) -> list[Shard]:
    generator = np.random.default_rng(0)
    return [
        batches_of(
            500,
            features=generator.normal(size=(rows // WORKERS, 784)).astype(np.float32),
            label=generator.integers(0, 10, rows // WORKERS),
        )
        for _ in range(WORKERS)
    ]


def resident_mb() -> list[float]:
    """Of this process, and the largest of its workers."""
    pids = [os.getpid(), *(p.pid for p in multiprocessing.active_children())]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    mb = [count * os.sysconf("SC_PAGE_SIZE") / 1e6 for count in pages]
    return [mb[0], max(mb[1:], default=0.0)]


def train_seconds(data: list[Shard], *, checkpoints: bool) -> float:
    """Seconds from the first epoch's first row to the last epoch's last round."""
    with tempfile.TemporaryDirectory() as folder:
        policy = CheckpointPolicy(path=folder) if checkpoints else None
        outcome = run_world(job(EPOCHS), data, ranks_as="processes", checkpoints=policy)
    return sum(epoch.seconds for epoch in outcome.history)


def seconds_with_a_kill(data: list[Shard]) -> float:
    """The same, with a worker killed in the middle of the epoch halfway."""

    def kill(event: object) -> None:
        if isinstance(event, EpochSummary) and event.epoch == EPOCHS // 2:
            victim = min(multiprocessing.active_children(), key=lambda process: process.name)
            threading.Timer(event.seconds / 2, os.kill, [victim.pid, signal.SIGKILL]).start()

    outcome = run_world(job(EPOCHS), data, ranks_as="processes", on_event=kill)
    assert all(epoch.examples == ROWS for epoch in outcome.history)
    return sum(epoch.seconds for epoch in outcome.history)


def memory(rounds: int) -> tuple[list[float], list[float]]:
    """Resident megabytes of driver and worker early and late in a job of so many rounds."""
    taken: dict[int, list[float]] = {}
    counts = dict.fromkeys(range(WORKERS), 0)

    def look(event: object) -> None:
        if isinstance(event, WindowReport):
            counts[event.rank] += 1
            if event.rank == 0 and counts[0] in (rounds // 5, rounds - 5):
                taken[counts[0]] = resident_mb()

    rows = 40 * WORKERS
    with tempfile.TemporaryDirectory() as folder:
        run_world(
            job(rounds // 20, period=1, rows_a_batch=2),
            shards(rows),
            ranks_as="processes",
            checkpoints=CheckpointPolicy(path=folder),
            on_event=look,
        )
    early, late = (taken[key] for key in sorted(taken))
    return early, late


def main() -> None:
    parsed = arguments(__doc__, repeats=5, quick_repeats=1)
    data = shards(ROWS)
    times = interleave(
        {
            "without checkpoints": partial(train_seconds, data, checkpoints=False),
            "with a checkpoint an epoch": partial(train_seconds, data, checkpoints=True),
        },
        repeats=parsed.repeats,
    )
    plain, saved = (show(name, values) for name, values in times.items())
    killed = [seconds_with_a_kill(data) for _ in range(1 if parsed.quick else 3)]
    window = plain / (EPOCHS * (ROWS / WORKERS / BATCH / PERIOD))
    cost = show("with a worker killed halfway", killed) - plain
    started = time.monotonic()
    early, late = memory(200 if parsed.quick else 1000)
    print(f"memory early {early} MB, late {late} MB, in {time.monotonic() - started:.0f} s")
    claims = [
        Claim(name="time with a checkpoint an epoch / without", ratio=saved / plain, target=1.02),
        Claim(
            name="cost of a killed worker / (its window + 15 s)",
            ratio=cost / (window + RESTART_S),
            target=1.0,
        ),
        Claim(name="driver's memory, late / early", ratio=late[0] / early[0], target=1.02),
        Claim(name="a worker's memory, late / early", ratio=late[1] / early[1], target=1.02),
    ]
    measured = {
        "seconds": {**times, "killed": killed},
        "window_s": window,
        "memory_mb": {"early": early, "late": late},
    }
    report("recovery", claims, measured)


if __name__ == "__main__":
    main()
