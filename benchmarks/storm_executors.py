"""The part of the chaos benchmark on real executors: fits on ``local-cluster[3,1,1024]``."""

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import harness
import pyarrow as pa
import pyarrow.compute
import torch
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from storms import Ended, Kind, Result, run_jobs
from support.chaos import Deed, Storm
from support.replay import recorded_commits, replay
from torch import Tensor, nn

from sparkdl import GradientAllReduce, ParameterAveraging, TorchEstimator, TorchModel
from sparkdl.driver import Observers, Outcome, RunOptions, run
from sparkdl.feed.record_batches.packed import unpacked
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.launch.worker_rows import Workers, worker_frame
from sparkdl.spark.rows.columns import input_column
from sparkdl.spark.rows.delivery import Delivery
from sparkdl.strategies import Strategy
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORKERS = 3
ROWS = 480
EPOCHS = 10
FAULTS_A_JOB = 6
STRATEGIES = (ParameterAveraging(3), GradientAllReduce())
CONF = {
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # There are meant to be many faults; Spark's own patience is not what is measured.
    "spark.task.maxFailures": "1000",
    "spark.stage.maxConsecutiveAttempts": "1000",
    "spark.deploy.maxExecutorRetries": "-1",
}


class Network(nn.Module):
    """Is slow on purpose, and records in a folder which process trains which rank."""

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


def run_part(seed: int, faults: int) -> list[Ended]:
    """Run jobs on this machine's executors until ``faults`` faults were injected."""
    spark = start_session(f"local-cluster[{WORKERS},1,1024]", CONF)
    try:
        return jobs_under_faults(spark, "executors", seed, faults)
    finally:
        spark.stop()


def start_session(master: str, conf: dict[str, str]) -> SparkSession:
    os.environ.update(harness.child_environment())
    spark = harness.session(master, conf)
    spark.sparkContext.setLogLevel("OFF")
    return spark


def jobs_under_faults(
    spark: SparkSession,
    part: str,
    seed: int,
    faults: int,
    *,
    host: str = "127.0.0.1",
    more: Sequence[Deed] = (),
    every_s: float = 0.8,
) -> list[Ended]:
    """Run jobs until ``faults`` faults were injected; returns how they ended.

    Args:
        spark: a session with three executors with one core each.
        part: the part of the benchmark.
        seed: the seed of the first job's faults.
        faults: the number of faults in all.
        host: where the executors reach the connections that break.
        more: faults besides those that every part has.
        every_s: seconds between two faults, on average.
    """
    frame = rows(spark)
    with tempfile.TemporaryDirectory() as folder:
        calm, _ = fit(frame, STRATEGIES[1], None, folder)

    def start(seed: int) -> tuple[Storm, Strategy, Callable[[], Result]]:
        strategy, folder = STRATEGIES[seed % len(STRATEGIES)], tempfile.TemporaryDirectory()
        found = partial(victims, str(Path(folder.name, "pids")))
        storm = Storm(seed, FAULTS_A_JOB, found, every_s=every_s, host=host, more=more)

        def train() -> Result:
            with folder, recorded_commits() as commits:
                model, job = fit(frame, strategy, storm, folder.name)
            expected = calm.module
            if strategy is STRATEGIES[0]:
                expected = replay(job, shards(frame, job.seed), commits)
            return Result(history=model.history, module=model.module, expected=expected)

        return storm, strategy, train

    kind = Kind(part=part, rows=ROWS, epochs=EPOCHS, left_behind=left_behind)
    return run_jobs(kind, seed, faults, start)


def fit(
    frame: DataFrame, strategy: Strategy, storm: Storm | None, folder: str
) -> tuple[TorchModel, Job]:
    """Returns the fitted model and its workers' job; with faults if there is a storm."""
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
        timeout=120.0,
        maxFailures=1000,
        checkpointPath=str(Path(folder, "checkpoints")),
    )
    jobs: list[Job] = []

    def stormy(
        job: Job, size: int, launch: Any, options: RunOptions, observers: Observers
    ) -> Outcome:
        jobs.append(job)
        if storm is None:
            return run(job, size, launch, options, observers)

        def both(event: Any) -> None:
            storm.on_event(event)
            observers.on_event(event)

        return run(job, size, storm.over(launch), options, replace(observers, on_event=both))

    with mock.patch("sparkdl.estimator.estimator.run", stormy):
        return estimator.fit(frame), jobs[0]


def rows(spark: SparkSession) -> DataFrame:
    numbers = [((F.col("id") * 7919 + k * 1299709) % 1000) / 512 - 1 for k in range(4)]
    frame = spark.range(0, ROWS, 1, WORKERS).select(F.array(*numbers).alias("features"))
    label = (F.abs(F.col("features")[0]) + F.col("features")[1] > 0.7).cast("int")
    return frame.withColumn("label", label)


def shards(frame: DataFrame, seed: int) -> list[list[pa.RecordBatch]]:
    """The rows of each worker, with what orders them, as the fit's own job passes them."""
    workers = Workers(
        frame=frame,
        columns=tuple(input_column(frame, name, "featuresCols") for name in frame.columns),
        num_workers=WORKERS,
        delivery=Delivery(),
        device="cpu",
        description="the rows of a storm",
        network=network_of(frame.sparkSession),
    )
    fed = worker_frame(workers, seed)
    table = fed.select("*", F.spark_partition_id().alias("rank")).toArrow()
    of_ranks = [table.filter(pa.compute.equal(table["rank"], rank)) for rank in range(WORKERS)]
    return [
        [unpacked(batch) for batch in rows.drop_columns("rank").to_batches()] for rows in of_ranks
    ]


def victims(folder: str) -> list[tuple[str, int]]:
    """The workers' live processes, and their executors."""
    found = []
    for name in os.listdir(folder):
        rank, _, pid = name.partition("-")
        with contextlib.suppress(OSError, IndexError):  # it has ended
            executor = parent(parent(int(pid)))  # a worker is a child of a daemon of the executor
            found += [(f"worker {rank}", int(pid)), (f"executor {rank}", executor)]
    return [(name, pid) for name, pid in found if pid > 1]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def left_behind() -> str:
    """Threads that a job left in the driver, after ten seconds to end."""
    deadline = time.monotonic() + 10
    while True:
        left = [t.name for t in threading.enumerate() if t.name.startswith("sparkdl")]
        if not left or time.monotonic() > deadline:
            return ", ".join(left)
        time.sleep(0.1)
