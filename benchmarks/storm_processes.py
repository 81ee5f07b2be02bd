"""The part of the chaos benchmark in which every worker is a process on this machine."""

import itertools
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from pathlib import Path

import cloudpickle
import numpy as np
import pyarrow as pa
import torch
from storms import Ended, Kind, Result, band_between, run_jobs
from support.chaos import Chaos, Storm
from support.replay import recorded_commits, replay
from torch import Tensor, nn

from sparkdl.driver import Outcome
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = (160, 120, 140)
EPOCHS = 10
WIDTH = 8
FAULTS_A_JOB = 10
OWN_STATE = ParameterAveraging(3, average_optimizer_state=False)
STRATEGIES = (ParameterAveraging(3), OWN_STATE, GradientAllReduce())


class Network(nn.Module):
    """Takes ten milliseconds per minibatch on a worker, so that faults fall within the training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, features: Tensor) -> Tensor:
        if multiprocessing.current_process().name.startswith("rank "):
            time.sleep(0.01)
        return self.layers(features)


def run_part(seed: int, faults: int) -> list[Ended]:
    """Run jobs until ``faults`` faults were injected; returns how they ended."""
    util.get_temp_dir()  # sets multiprocessing's folder before tempfile's changes
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # hides other programs' files
        try:
            return jobs_under_faults(seed, faults)
        finally:
            tempfile.tempdir = None


def jobs_under_faults(seed: int, faults: int) -> list[Ended]:
    data = shards(ROWS)
    calm = {
        strategy: run_world(job(strategy), data, ranks_as="processes") for strategy in STRATEGIES
    }
    alone = run_world(job(OWN_STATE), shards((sum(ROWS),)))
    band = band_between(alone.history[-1].loss, calm[OWN_STATE].history[-1].loss)

    def start(seed: int) -> tuple[Storm, Strategy, Callable[[], Result]]:
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        chaos = Chaos(job(strategy), data, seed, FAULTS_A_JOB, every_s=0.3)

        def run() -> Result:
            with recorded_commits() as commits:
                outcome: Outcome = chaos.run()
            expected = None if strategy is OWN_STATE else calm[strategy].module
            if strategy is STRATEGIES[0]:
                expected = replay(chaos.job, data, commits)
            return Result(
                history=outcome.history,
                module=outcome.module,
                expected=expected,
                band=band if strategy is OWN_STATE else None,
            )

        return chaos.storm, strategy, run

    kind = Kind(part="processes", rows=sum(ROWS), epochs=EPOCHS, left_behind=left_behind)
    return run_jobs(kind, seed, faults, start)


def job(strategy: Strategy) -> Job:
    return Job(
        model=Network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        strategy=strategy,
        schema=FeedSchema(
            (ColumnSpec("features", torch.float32, (WIDTH,)),), ColumnSpec("label", torch.int64)
        ),
        epochs=EPOCHS,
        batch_size=8,
        seed=3,
        deadline_s=60.0,
        max_failures=1000,
    )


def shards(sizes: tuple[int, ...]) -> list[list[pa.RecordBatch]]:
    generator = np.random.default_rng(5)
    features = generator.normal(size=(sum(sizes), WIDTH)).astype(np.float32)
    labels = (np.abs(features[:, 0]) + features[:, 1] > 0.7).astype(np.int64)
    starts = np.cumsum([0, *sizes])
    return [
        batches_of(50, features=features[a:b], label=labels[a:b])
        for a, b in itertools.pairwise(starts)
    ]


def left_behind() -> str:
    """What a job left behind, after ten seconds in which things may end on their own."""
    deadline = time.monotonic() + 10
    while True:
        threads = [t.name for t in threading.enumerate() if t.name.startswith("sparkdl")]
        processes = [p.name for p in multiprocessing.active_children()]
        files = [p.name for p in Path(tempfile.gettempdir()).glob("sparkdl-*")]
        left = threads + processes + files
        if not left or time.monotonic() > deadline:
            return ", ".join(left)
        time.sleep(0.1)
