"""Trainings under a hundred random faults: does each end with the right model, and nothing left?

Jobs of three workers, each a process, train behind a proxy while faults are drawn: kill -9, SIGSTOP
for up to three seconds, a reset connection, a message cut at a random byte, a full disk. They
average parameters or reduce gradients in turn. A job is right if every epoch trained on every row
once and the final loss lies within a tenth of a run without faults. Nothing may be left: process,
thread, open port, file.
``--seed`` replays a run. Patience with silent workers is two seconds here, not fifteen.
"""

import itertools
import multiprocessing
import sys
import tempfile
import threading
import time
from functools import partial
from multiprocessing import util
from pathlib import Path

import cloudpickle
import numpy as np
import pyarrow as pa
import torch
from harness import Claim, parse, parser, report
from torch import Tensor, nn

from sparkdl.averager import members
from sparkdl.driver import Outcome
from sparkdl.errors import SparkDLError
from sparkdl.feed.columns import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import batches_of, run_world
from sparkdl.testing.chaos import Chaos
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = (160, 120, 140)
EPOCHS = 10
WIDTH = 8
FAULTS_A_JOB = 10
BAND = 0.1


class Network(nn.Module):
    """Takes ten milliseconds for a minibatch, so that faults fall into the training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, features: Tensor) -> Tensor:
        time.sleep(0.01)
        return self.layers(features)


STRATEGIES = (
    ParameterAveraging(3, average_optimizer_state=True),
    ParameterAveraging(3, average_optimizer_state=False),
    GradientAllReduce(),
)


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


def shards() -> list[list[pa.RecordBatch]]:
    generator = np.random.default_rng(5)
    features = generator.normal(size=(sum(ROWS), WIDTH)).astype(np.float32)
    labels = (np.abs(features[:, 0]) + features[:, 1] > 0.7).astype(np.int64)
    starts = np.cumsum([0, *ROWS])
    return [
        batches_of(50, features=features[a:b], label=labels[a:b])
        for a, b in itertools.pairwise(starts)
    ]


def left_behind() -> str:
    """What a job left, after ten seconds in which things may end by themselves."""
    deadline = time.monotonic() + 10
    while True:
        threads = [t.name for t in threading.enumerate() if t.name.startswith("sparkdl")]
        processes = [p.name for p in multiprocessing.active_children()]
        files = [p.name for p in Path(tempfile.gettempdir()).glob("sparkdl-*")]
        left = threads + processes + files
        if not left or time.monotonic() > deadline:
            return ", ".join(left)
        time.sleep(0.1)


def judge(outcome: Outcome, band: tuple[float, float]) -> str:
    """What is wrong with a job's outcome; empty if nothing is."""
    wrong = [row for row in outcome.history if row.examples != sum(ROWS)]
    if len(outcome.history) != EPOCHS or wrong:
        return f"rows were lost or doubled: {wrong}"
    loss = outcome.history[-1].loss
    if not band[0] <= loss <= band[1]:
        return f"final loss {loss:.4f} outside of {band[0]:.4f} to {band[1]:.4f}"
    return left_behind() and f"left behind: {left_behind()}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seed", type=int, default=1, help="of the first job")
    options.add_argument("--faults", type=int, default=100, help="in all")
    parsed = parse(options, repeats=1)
    faults = 20 if parsed.quick else parsed.faults
    util.get_temp_dir()  # which is multiprocessing's, before tempfile's changes
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # other programs' files are not to be seen
        run_jobs(faults, parsed.seed)


def run_jobs(faults: int, first_seed: int) -> None:
    """Run jobs until so many faults were injected, and report."""
    data, seconds = shards(), []
    bands = {}
    for strategy in STRATEGIES:
        loss = run_world(job(strategy), data, ranks_as="processes").history[-1].loss
        bands[str(strategy)] = loss * (1 - BAND), loss * (1 + BAND)
        print(f"final loss without faults: {loss:.4f} with {strategy}")
    members.STRAGGLER_S = 2.0
    kinds: dict[str, int] = {}
    jobs = right = injected = 0
    while injected < faults:
        seed = first_seed + jobs
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        chaos = Chaos(job(strategy), data, seed, FAULTS_A_JOB, every_s=0.3)
        storm = chaos.storm
        started = time.monotonic()
        try:
            problem = judge(chaos.run(), bands[str(strategy)])
        except SparkDLError as error:
            problem = f"{type(error).__name__}: {error}"
        seconds.append(time.monotonic() - started)
        jobs, right = jobs + 1, right + (not problem)
        print(f"  {', '.join(storm.injected)}")
        for fault in storm.injected:
            word = fault.split()[0]
            kinds[word] = kinds.get(word, 0) + 1
        injected += storm.hits
        print(
            f"seed {seed}, {type(strategy).__name__}: {len(storm.injected)} faults, "
            f"{len(storm.losses)} losses seen, {seconds[-1]:.1f} s: {problem or 'right'}",
            flush=True,
        )
    claim = Claim(name="jobs with the right end", ratio=right / jobs, target=1.0, at_least=True)
    report(
        "chaos",
        [claim],
        {
            "jobs": jobs,
            "faults": injected,
            "kinds": kinds,
            "seed": first_seed,
            "band_of_final_loss": bands,
            "seconds_a_job": seconds,
        },
    )


if __name__ == "__main__":
    main()
