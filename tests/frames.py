"""DataFrames made in the JVM from row ids by exact arithmetic, so that numpy can make them too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn
from waiting import eventually

from sparkdl import ParameterAveraging, TorchEstimator, TorchModel
from sparkdl.estimator.checks.building import build
from sparkdl.estimator.checks.preflight import job_of
from sparkdl.replica import Replica

Refuse = Callable[..., str]
"""The fixture ``refuse``: (rows, error, *fragments of its message, **estimator_changes)."""
WIDTH = 4
CLASSES = 3


def with_features(ids: DataFrame, width: int = WIDTH) -> DataFrame:
    """From a column ``id`` to (id, features array<double>, label int)."""
    numbers = [((F.col("id") * 7919 + k * 1299709) % 1000) / 512 - 1 for k in range(width)]
    label = ((F.col("id") * 31) % CLASSES).cast("int")
    return ids.select("id", F.array(*numbers).alias("features"), label.alias("label"))


def frame(
    spark: SparkSession, rows: int = 60, partitions: int = 3, width: int = WIDTH
) -> DataFrame:
    return with_features(spark.range(0, rows, 1, partitions), width)


def frame_of_sizes(spark: SparkSession, sizes: Sequence[int]) -> DataFrame:
    """One partition for each size, in that order; ids count through.

    Not a union, for Spark makes one partition of several frames of one partition each.
    """
    most = max(sizes)
    part, place = F.expr(f"cast(id div {most} as int)"), F.col("id") % most
    starts = np.cumsum([0, *sizes]).tolist()
    kept = spark.range(0, most * len(sizes), 1, len(sizes)).where(place < _item(sizes, part))
    return with_features(kept.select((_item(starts, part) + place).alias("id")))


def _item(numbers: Sequence[int], index: Column) -> Column:
    return F.array(*map(F.lit, numbers))[index]


def features_of(ids: Sequence[int] | np.ndarray, width: int = WIDTH) -> np.ndarray:
    """The features of those rows, shape (rows, width), float64."""
    column = np.asarray(ids, dtype=np.int64)[:, None]
    return ((column * 7919 + np.arange(width) * 1299709) % 1000) / 512 - 1


def labels_of(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return (np.asarray(ids, dtype=np.int64) * 31) % CLASSES


def descended(module: nn.Module, targets: np.ndarray, lr: float, steps: int) -> nn.Module:
    """Plain gradient descent on rows 0, 1, ... of these targets, all of them in each step."""
    features = torch.tensor(features_of(range(len(targets))), dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(features), torch.tensor(targets)).backward()
        optimizer.step()
    return module


def in_files(rows: DataFrame, path: Path) -> DataFrame:
    """The rows, read from Parquet files below a path that is not there yet."""
    rows.write.parquet(path.as_uri())
    return rows.sparkSession.read.parquet(path.as_uri())


def ids_by_partition(rows: DataFrame) -> list[list[int]]:
    """The ids in each partition, in their order."""
    parts: list[list[int]] = [[] for _ in range(rows.rdd.getNumPartitions())]
    for row in rows.select(F.spark_partition_id().alias("part"), "id").collect():
        parts[row.part].append(row.id)
    return parts


@contextmanager
def configured(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """A session with settings, which it has no longer after the block."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)


def all_jobs_end(spark: SparkSession, wait_s: float = 10.0) -> bool:
    """Whether all jobs end soon; the tracker hears of an end a little after its caller does."""
    tracker = spark.sparkContext.statusTracker()
    return eventually(lambda: not tracker.getActiveJobsIds(), wait_s)


@contextmanager
def no_jobs(spark: SparkSession) -> Iterator[None]:
    """A session that starts no job within the block."""
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()
    before = scheduler.numTotalJobs()
    yield
    assert scheduler.numTotalJobs() == before


def estimator(**changes: Any) -> TorchEstimator:
    """Two workers, one epoch of silent SGD on batches of 10, averaged every second step."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    settings: dict[str, Any] = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "strategy": ParameterAveraging(period=2),
        "epochs": 1,
        "batchSize": 10,
        "numWorkers": 2,
        "seed": 7,
        "progress": False,
        "timeout": 300.0,
    }
    return TorchEstimator(**{**settings, **changes})


def built(model: Any, **changes: Any) -> Replica:
    """The replica that a fit tries out, of what builds its model."""
    return build(job_of(estimator(model=model, **changes)))


def same_bits(first: TorchModel, second: TorchModel) -> bool:
    mine, other = first.module.state_dict(), second.module.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)
