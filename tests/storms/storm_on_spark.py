"""Fits under random faults on real executors, or on hosts that as a whole are cut off or crash.

    python storm_on_spark.py executors|hosts SEED...

The hosts are network namespaces of this machine with a Spark standalone cluster on them
(``tests/cluster/hosts.py``); they need root.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.compute
import torch
from hosts import Cluster, Host, Hosts
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from storms import require_every_row, require_same, show
from support.chaos import Storm
from support.replay import recorded_commits, replay
from torch import Tensor, nn
from toys import sparkdl_threads
from waiting import eventually

from sparkdl import GradientAllReduce, ParameterAveraging, TorchEstimator, TorchModel
from sparkdl.averager.coordination import membership
from sparkdl.driver import Observers, Outcome, RunOptions, run
from sparkdl.errors import SparkDLError
from sparkdl.feed.packed import unpacked
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.launch.worker_rows import Workers, worker_frame
from sparkdl.spark.rows.columns import input_column
from sparkdl.strategies import Strategy
from sparkdl.worker import Job

WORKERS = 3
ROWS = 480
EPOCHS = 10
FAULTS_A_JOB = 6
STRATEGIES = (ParameterAveraging(3), GradientAllReduce())
CONF = {
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # There are meant to be many faults; Spark's own patience is not what is tested.
    "spark.task.maxFailures": "1000",
    "spark.stage.maxConsecutiveAttempts": "1000",
    "spark.deploy.maxExecutorRetries": "-1",
}
SILENT_S = 16.0
"""The longest that a host is cut off or paused."""
HOST_CONF = {
    # Makes Spark give up some of the executors that are cut off, while others come back.
    "spark.network.timeout": "12s",
    "spark.network.timeoutInterval": "4s",
    "spark.executor.heartbeatInterval": "2s",
    "spark.executor.instances": str(WORKERS),
    "spark.executor.cores": "1",
    "spark.cores.max": str(WORKERS),
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


@contextmanager
def started(master: str, conf: dict[str, str]) -> Iterator[SparkSession]:
    builder = SparkSession.builder.master(master).appName("storm")
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        spark.stop()


def on_executors(seeds: Sequence[int]) -> list[str]:
    """What is wrong with fits on this machine's executors."""
    with started(f"local-cluster[{WORKERS},1,1024]", CONF) as spark:
        return problems(spark, "executors", seeds, every_s=0.8)


def on_hosts(seeds: Sequence[int]) -> list[str]:
    """What is wrong with fits on three hosts."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(WORKERS, Path(folder)) as hosts,
        Cluster(hosts) as cluster,
    ):
        gateway, deeds = hosts.gateway, HostFaults(cluster)
        address = {"spark.driver.host": gateway, "spark.driver.bindAddress": gateway}
        more = [deeds.cut, deeds.cut, deeds.pause, deeds.crash]
        with started(cluster.master, CONF | HOST_CONF | address) as spark:
            return problems(spark, "hosts", seeds, every_s=1.5, host=gateway, more=more)


def problems(spark: SparkSession, part: str, seeds: Sequence[int], **of_storm: Any) -> list[str]:
    """What is wrong with each fit that has not ended right.

    Args:
        spark: a session with three executors with one core each.
        part: what to call the fits.
        seeds: of the faults of each.
        of_storm: settings of each storm.
    """
    frame, wrong, hits = rows(spark), [], 0
    with tempfile.TemporaryDirectory() as folder:
        calm, _ = fit(frame, STRATEGIES[1], None, folder)
    for seed in seeds:
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        with tempfile.TemporaryDirectory() as folder:
            found = partial(victims, str(Path(folder, "pids")))
            storm = Storm(seed, FAULTS_A_JOB, found, **of_storm)
            began = time.monotonic()
            try:
                with recorded_commits() as commits:
                    model, job = fit(frame, strategy, storm, folder)
                require_every_row(model.history, ROWS, EPOCHS)
                expected = calm.module
                if strategy is STRATEGIES[0]:
                    expected = replay(job, shards(frame, job.seed), commits)
                difference = require_same(model.module, expected)
                assert eventually(lambda: not sparkdl_threads(), 10), sparkdl_threads()
                print(f"{time.monotonic() - began:.1f} s, parameters within {difference:.1g}")
            except (SparkDLError, AssertionError) as error:
                wrong.append(f"{part}, STORM_SEED={seed}: {type(error).__name__}: {error}")
        show(part, seed, strategy, storm)
        hits += storm.hits
    if hits < FAULTS_A_JOB * len(seeds) / 2:
        wrong.append(f"{part}: only {hits} faults had something to hit")
    return wrong


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

    with mock.patch("sparkdl.estimator.checks.row_checks.run", stormy):
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
        shuffle="exchange",
        device="cpu",
        description="the rows of a storm",
        network=network_of(frame.sparkSession),
    )
    fed = worker_frame(workers)
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


class HostFaults:
    """What can happen to whole hosts.

    Args:
        cluster: the cluster on the hosts.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def cut(self, generator: random.Random) -> str:
        """Cut a host off for a while: packets vanish without notice."""
        host, seconds = self._pick(generator)
        host.cut()
        time.sleep(seconds)
        host.mend()
        return f"cut {host.name} off for {seconds:.1f} s"

    def pause(self, generator: random.Random) -> str:
        """Stop everything that runs on a host for a while."""
        host, seconds = self._pick(generator)
        host.pause()
        time.sleep(seconds)
        host.resume()
        return f"pause {host.name} for {seconds:.1f} s"

    def crash(self, generator: random.Random) -> str:
        """Kill everything that runs on a host at once, and restart Spark's worker there."""
        host, _ = self._pick(generator)
        host.crash()
        self._cluster.boot(host)
        return f"crash {host.name}"

    def _pick(self, generator: random.Random) -> tuple[Host, float]:
        host = generator.choice(self._cluster.hosts.hosts)
        return host, generator.uniform(0.5, SILENT_S)


def main(part: str, *seeds: str) -> None:
    membership.STRAGGLER_S = 2.0
    run_part = {"executors": on_executors, "hosts": on_hosts}[part]
    sys.exit("\n".join(run_part([int(seed) for seed in seeds])) or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
