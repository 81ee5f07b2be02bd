"""What checkpoints and a lost worker cost, and whether memory stays flat over a thousand rounds.

Four workers, each a process on this machine, train the network of the other benchmarks on made-up
digits. In one job every second epoch ends with a checkpoint, which is written in the epoch after:
these epochs are compared with the others of the same job. Then one of the four is killed -9
halfway, and the cost is what the job took longer than without; where the workers need each other
(GradientAllReduce) all start again from the last commit. Memory is the resident set of the driver
and of its workers, in the second hundred rounds and in the last of a thousand.
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
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import batches_of, run_world
from sparkdl.testing.world import Shard
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORKERS = 4
ROWS = 24_000
EPOCHS = 4
PERIOD = 5
BATCH = 16
AVERAGING = ParameterAveraging(PERIOD)
COMMIT_EVERY = 20
COMMITTING = GradientAllReduce(commit_every=COMMIT_EVERY)
RESTART_S = 15.0
"""What a lost worker may cost beside its own window."""


def network() -> nn.Module:
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def job(epochs: int, strategy: Strategy = AVERAGING, rows_a_batch: int = BATCH) -> Job:
    return Job(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        strategy=strategy,
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


def epochs_with_and_without(data: list[Shard], epochs: int) -> tuple[list[float], list[float]]:
    """Seconds of the epochs in which a checkpoint is written, and of the others."""
    with tempfile.TemporaryDirectory() as folder:
        policy = CheckpointPolicy(path=folder, every=2)
        outcome = run_world(job(epochs), data, ranks_as="processes", checkpoints=policy)
    seconds = [epoch.seconds for epoch in outcome.history]
    # The first two have costs of their own.
    return seconds[2::2], seconds[3::2]


def train_seconds(data: list[Shard], strategy: Strategy, *, kill: bool = False) -> float:
    """Seconds from start to end of a job, perhaps with a worker killed in the middle."""

    def kill_one(event: object) -> None:
        if kill and isinstance(event, EpochSummary) and event.epoch == EPOCHS // 2:
            victim = min(multiprocessing.active_children(), key=lambda process: process.name)
            threading.Timer(event.seconds / 2, os.kill, [victim.pid, signal.SIGKILL]).start()

    started = time.monotonic()
    outcome = run_world(job(EPOCHS, strategy), data, ranks_as="processes", on_event=kill_one)
    assert all(epoch.examples == ROWS for epoch in outcome.history)
    return time.monotonic() - started


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
            job(rounds // 20, ParameterAveraging(1), rows_a_batch=2),
            shards(rows),
            ranks_as="processes",
            checkpoints=CheckpointPolicy(path=folder),
            on_event=look,
        )
    early, late = (taken[key] for key in sorted(taken))
    return early, late


def main() -> None:
    parsed = arguments(__doc__, repeats=3, quick_repeats=1)
    data = shards(ROWS)
    saved, plain = (
        show(name, values)
        for name, values in zip(
            ("an epoch with a checkpoint", "an epoch without"),
            epochs_with_and_without(data, 8 if parsed.quick else 40),
            strict=True,
        )
    )
    times = interleave(
        {
            "averaging": partial(train_seconds, data, AVERAGING),
            "averaging, one killed": partial(train_seconds, data, AVERAGING, kill=True),
            "all-reduce": partial(train_seconds, data, GradientAllReduce()),
            "all-reduce, commits": partial(train_seconds, data, COMMITTING),
            "all-reduce, commits, one killed": partial(train_seconds, data, COMMITTING, kill=True),
        },
        repeats=parsed.repeats,
    )
    seconds = {name: show(name, values) for name, values in times.items()}
    steps = EPOCHS * ROWS / WORKERS / BATCH
    window = seconds["averaging"] / steps * PERIOD
    cost = seconds["averaging, one killed"] - seconds["averaging"]
    repeated = seconds["all-reduce, commits"] / steps * COMMIT_EVERY
    cost_of_all = seconds["all-reduce, commits, one killed"] - seconds["all-reduce, commits"]
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
        Claim(
            name="cost of a killed worker of all-reduce / (steps of a commit + 15 s)",
            ratio=cost_of_all / (repeated + RESTART_S),
            target=1.0,
        ),
        Claim(name="driver's memory, late / early", ratio=late[0] / early[0], target=1.02),
        Claim(name="a worker's memory, late / early", ratio=late[1] / early[1], target=1.02),
    ]
    measured = {
        "epoch_s": {"with a checkpoint": saved, "without": plain},
        "seconds": times,
        "window_s": window,
        "cost_s": {"averaging": cost, "all-reduce": cost_of_all},
        "commits / none": seconds["all-reduce, commits"] / seconds["all-reduce"],
        "memory_mb": {"early": early, "late": late},
    }
    report("recovery", claims, measured)


if __name__ == "__main__":
    main()
