"""What safety costs: checkpoints and the watchdog, and a lost worker.

``epochs``: a fit on four executors; epochs during which a checkpoint is written and the watchdog is
on, against those with neither (``epoch_costs.py``). ``losses``: four workers, each a process on
this machine, train the network of the other benchmarks on synthetic digits, and one of the four is
killed (kill -9) halfway. The cost is how much longer the job took than without; where the workers
need each other (GradientAllReduce), all start again from the last commit.
"""

import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import epoch_costs
import numpy as np
import torch
from harness import Claim, interleave, parse, parser, report, show
from torch import nn

from sparkdl.events import EpochSummary
from sparkdl.feed.columns.schema import FeedSchema
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
"""Seconds that a lost worker may cost besides its own window."""


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
    """Resident MB of this process, and of the largest of its workers."""
    pids = [os.getpid(), *(p.pid for p in multiprocessing.active_children())]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    mb = [count * os.sysconf("SC_PAGE_SIZE") / 1e6 for count in pages]
    return [mb[0], max(mb[1:], default=0.0)]


def train_seconds(data: list[Shard], strategy: Strategy, *, kill: bool = False) -> float:
    """Seconds from the start to the end of a job, perhaps with a worker killed in the middle."""

    def kill_one(event: object) -> None:
        if kill and isinstance(event, EpochSummary) and event.epoch == EPOCHS // 2:
            victim = min(multiprocessing.active_children(), key=lambda process: process.name)
            threading.Timer(event.seconds / 2, os.kill, [victim.pid, signal.SIGKILL]).start()

    started = time.monotonic()
    outcome = run_world(job(EPOCHS, strategy), data, ranks_as="processes", on_event=kill_one)
    assert all(epoch.examples == ROWS for epoch in outcome.history)
    return time.monotonic() - started


Measured = tuple[list[Claim], dict[str, Any]]


def costs_of_epochs(epochs: int) -> Measured:
    """What checkpoints and the watchdog add to an epoch."""
    seconds = epoch_costs.measure(epochs)
    for kind, values in seconds.items():
        show(f"an epoch with {kind}", values)
    ratios = epoch_costs.ratios(seconds)
    name = "epoch with a checkpoint and the watchdog / with neither"
    return [Claim(name=name, ratio=ratios["both"], target=1.02)], {
        "epoch_s": {kind: statistics.median(values) for kind, values in seconds.items()},
        "epoch / with neither": ratios,
        "epochs_of_each_kind": len(seconds["both"]),
    }


def costs_of_losses(repeats: int) -> Measured:
    """What a worker that is killed halfway costs."""
    data = shards(ROWS)
    times = interleave(
        {
            "averaging": partial(train_seconds, data, AVERAGING),
            "averaging, one killed": partial(train_seconds, data, AVERAGING, kill=True),
            "all-reduce": partial(train_seconds, data, GradientAllReduce()),
            "all-reduce, commits": partial(train_seconds, data, COMMITTING),
            "all-reduce, commits, one killed": partial(train_seconds, data, COMMITTING, kill=True),
        },
        repeats=repeats,
    )
    seconds = {name: show(name, values) for name, values in times.items()}
    steps = EPOCHS * ROWS / WORKERS / BATCH
    window = seconds["averaging"] / steps * PERIOD
    cost = seconds["averaging, one killed"] - seconds["averaging"]
    repeated = seconds["all-reduce, commits"] / steps * COMMIT_EVERY
    cost_of_all = seconds["all-reduce, commits, one killed"] - seconds["all-reduce, commits"]
    claims = [
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
    ]
    return claims, {
        "seconds": times,
        "window_s": window,
        "cost_s": {"averaging": cost, "all-reduce": cost_of_all},
        "commits / none": seconds["all-reduce, commits"] / seconds["all-reduce"],
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("parts", nargs="*", choices=[[], "epochs", "losses"], help="both, or one")
    options.add_argument("--epochs", type=int, default=100, help="of the fit, a multiple of 4")
    parsed = parse(options, repeats=3, quick_repeats=1)
    claims: list[Claim] = []
    detail: dict[str, Any] = {}
    measures = {
        "epochs": partial(costs_of_epochs, 12 if parsed.quick else parsed.epochs),
        "losses": partial(costs_of_losses, parsed.repeats),
    }
    for part in parsed.parts or measures:
        more, measured = measures[part]()
        claims += more
        detail |= measured
    report("recovery", claims, detail)


if __name__ == "__main__":
    main()
