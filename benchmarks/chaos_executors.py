"""Trainings on real executors under random faults: does each end with every row counted once?

Jobs of three workers on ``local-cluster[3,1,1024]`` average parameters or reduce gradients in turn,
while faults are drawn: kill -9 and SIGSTOP of a worker's Python process or of its executor's JVM, a
reset connection, a message cut at a random byte, a full disk. A job is right if every epoch trained
on every row once and the final loss lies within a tenth of a run without faults. ``--seed`` replays
a run. Patience with silent workers is two seconds here, not fifteen.
"""

import contextlib
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import harness
import torch
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl import GradientAllReduce, ParameterAveraging, TorchEstimator
from sparkdl.averager import members
from sparkdl.driver import Outcome, run
from sparkdl.errors import SparkDLError
from sparkdl.strategies import Strategy
from sparkdl.testing.chaos import Storm

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORKERS = 3
ROWS = 480
EPOCHS = 10
FAULTS_A_JOB = 6
BAND = 0.1
STRATEGIES = (ParameterAveraging(3), GradientAllReduce())
CONF = {
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Faults are meant to be many; Spark's own patience is not what is measured.
    "spark.task.maxFailures": "1000",
    "spark.stage.maxConsecutiveAttempts": "1000",
    "spark.deploy.maxExecutorRetries": "-1",
}


class Network(nn.Module):
    """Takes its time for a minibatch, and says in a folder which process trains which rank."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.folder = folder

    def forward(self, features: Tensor) -> Tensor:
        context = TaskContext.get()
        if context is not None:
            Path(self.folder, f"{context.partitionId()}-{os.getpid()}").touch()
            time.sleep(0.03)
        return self.layers(features)


def victims(folder: str) -> list[tuple[str, int]]:
    """The workers' processes that live, and their executors."""
    found = []
    for name in os.listdir(folder):
        rank, _, pid = name.partition("-")
        with contextlib.suppress(OSError, IndexError):  # it has ended
            executor = parent(parent(int(pid)))  # a worker is a child of a daemon of the executor
            found += [(f"worker {rank}", int(pid)), (f"executor {rank}", executor)]
    return [(name, pid) for name, pid in found if pid > 1]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def rows(spark: SparkSession) -> DataFrame:
    numbers = [((F.col("id") * 7919 + k * 1299709) % 1000) / 512 - 1 for k in range(4)]
    frame = spark.range(0, ROWS, 1, WORKERS).select(F.array(*numbers).alias("features"))
    label = (F.abs(F.col("features")[0]) + F.col("features")[1] > 0.7).cast("int")
    return frame.withColumn("label", label)


def fit(frame: DataFrame, strategy: Strategy, storm: Storm | None, folder: str) -> Any:
    """Returns the fitted model; faults are injected if there is a storm."""
    pids = Path(folder, "pids")
    pids.mkdir()
    estimator = TorchEstimator(
        model=Network(str(pids)),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.003),
        strategy=strategy,
        epochs=EPOCHS,
        batchSize=8,
        numWorkers=WORKERS,
        progress=False,
        timeout=60.0,
        maxFailures=1000,
        checkpointPath=str(Path(folder, "checkpoints")),
    )
    if storm is None:
        return estimator.fit(frame)

    def stormy(job: Any, size: int, launch: Any, *, on_event: Any, **options: Any) -> Outcome:
        def both(event: Any) -> None:
            storm.on_event(event)
            on_event(event)

        return run(job, size, storm.over(launch), on_event=both, **options)

    with mock.patch("sparkdl.estimator.estimator.run", stormy):
        return estimator.fit(frame)


def judge(model: Any, band: tuple[float, float]) -> str:
    """What is wrong with a job's outcome; empty if nothing is."""
    examples = [epoch.examples for epoch in model.history]
    if examples != [ROWS] * EPOCHS:
        return f"rows were lost or doubled: {examples}"
    loss = model.history[-1].loss
    within = band[0] <= loss <= band[1]
    return "" if within else f"final loss {loss:.4f} outside of {band[0]:.4f} to {band[1]:.4f}"


def main() -> None:
    options = harness.parser(__doc__)
    options.add_argument("--seed", type=int, default=1, help="of the first job")
    options.add_argument("--faults", type=int, default=50, help="in all")
    parsed = harness.parse(options, repeats=1)
    faults = 2 * FAULTS_A_JOB if parsed.quick else parsed.faults
    os.environ.update(harness.child_environment())
    spark = harness.session(f"local-cluster[{WORKERS},1,1024]", CONF)
    spark.sparkContext.setLogLevel("OFF")
    frame = rows(spark)
    bands = {}
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            loss = fit(frame, strategy, None, folder).history[-1].loss
        bands[str(strategy)] = loss * (1 - BAND), loss * (1 + BAND)
        print(f"final loss without faults: {loss:.4f} with {strategy}", flush=True)
    members.STRAGGLER_S = 2.0
    injected: list[str] = []
    hits = 0
    problems: list[str] = []
    while hits < faults:
        seed = parsed.seed + len(problems)
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            pids = str(Path(folder, "pids"))
            storm = Storm(seed, FAULTS_A_JOB, partial(victims, pids), every_s=0.8)
            try:
                problem = judge(fit(frame, strategy, storm, folder), bands[str(strategy)])
            except SparkDLError as error:
                problem = f"{type(error).__name__}: {error}"
        injected += storm.injected
        hits += storm.hits
        problems.append(problem)
        print(f"  {', '.join(storm.injected)}")
        print(
            f"seed {seed}, {type(strategy).__name__}: {len(storm.losses)} losses seen, "
            f"{time.monotonic() - started:.1f} s: {problem or 'right'}",
            flush=True,
        )
    right = sum(not problem for problem in problems) / len(problems)
    claim = harness.Claim(name="jobs with the right end", ratio=right, target=1.0, at_least=True)
    detail = {"jobs": len(problems), "faults": hits, "injected": injected}
    harness.report("chaos_executors", [claim], {**detail, "problems": problems})
    spark.stop()


if __name__ == "__main__":
    main()
