"""The same seed gives the same bits, whatever way rows go; other streams go on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from frames import configured, estimator, frame, frame_of_sizes, in_files, same_bits, with_features
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl import TorchModel


def fit(frame: DataFrame, seed: int = 7) -> TorchModel:
    def model() -> nn.Module:  # local, because executors cannot import this module
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    return estimator(model=model, numWorkers=3, epochs=2, seed=seed).fit(frame)


def joined(spark: SparkSession) -> DataFrame:
    weights = spark.range(0, 90, 1, 4).select("id", (F.col("id") % 7).alias("weight"))
    return frame(spark, rows=90, partitions=5).join(weights.hint("shuffle_hash"), "id")


def grouped(spark: SparkSession) -> DataFrame:
    ids = spark.range(0, 270, 1, 4).groupBy((F.col("id") % 90).alias("id")).count()
    return with_features(ids)


def spread(spark: SparkSession) -> DataFrame:
    return frame(spark, rows=90, partitions=4).repartition(3)


def skewed(spark: SparkSession) -> DataFrame:
    return frame_of_sizes(spark, [70, 15, 5])


@pytest.mark.slow_variants
@pytest.mark.parametrize("upstream", [joined, grouped, spread, skewed])
def test_two_fits_with_one_seed_agree_to_the_bit_after_a_shuffle(
    spark: SparkSession, upstream: Callable[[SparkSession], DataFrame]
) -> None:
    assert same_bits(fit(upstream(spark)), fit(upstream(spark)))


@pytest.mark.slow
def test_two_fits_with_one_seed_agree_to_the_bit_on_more_files_than_workers(
    spark: SparkSession, tmp_path: Path
) -> None:
    sizes = {"spark.sql.files.openCostInBytes": "1", "spark.sql.files.maxPartitionBytes": "4096"}
    with configured(spark, sizes):
        rows = in_files(frame(spark, rows=140, partitions=10), tmp_path / "rows")
        assert rows.rdd.getNumPartitions() > 3  # so that workers read several
        again = spark.read.parquet((tmp_path / "rows").as_uri())
        assert same_bits(fit(rows), fit(again))


def test_two_fits_agree_to_the_bit_and_another_seed_differs(spark: SparkSession) -> None:
    rows = frame(spark, rows=90, partitions=3)
    first = fit(rows)
    assert same_bits(first, fit(rows))
    assert not same_bits(first, fit(rows, seed=8))


def test_rows_arriving_in_another_order_within_partitions_give_the_same_bits(
    spark: SparkSession,
) -> None:
    rows = frame(spark, rows=90, partitions=3)
    assert same_bits(
        fit(rows.sortWithinPartitions("id")), fit(rows.sortWithinPartitions(F.desc("id")))
    )


def test_a_fit_leaves_the_drivers_random_state_as_it_was(spark: SparkSession) -> None:
    ready = estimator(numWorkers=3)
    before = torch.random.get_rng_state()
    ready.fit(frame(spark, rows=30, partitions=3))
    assert torch.equal(torch.random.get_rng_state(), before)


COLUMNS = "pid bigint, python double, numpy double, torch double"


def streams(spark: SparkSession) -> dict[int, tuple[float, ...]]:
    """What each executor's Python process would draw next."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        drawn = [os.getpid(), random.random(), np.random.random(), float(torch.rand(()))]
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        names = [column.split()[0] for column in COLUMNS.split(", ")]
        yield pa.RecordBatch.from_arrays([pa.array([value]) for value in drawn], names)

    rows = spark.range(0, 3, 1, 3).mapInArrow(look, COLUMNS).collect()
    return {row.pid: (row.python, row.numpy, row.torch) for row in rows}


@pytest.mark.slow
def test_the_users_other_jobs_do_not_draw_what_a_fit_has_seeded(spark: SparkSession) -> None:
    estimator(numWorkers=3).fit(frame(spark))
    before = streams(spark)
    estimator(numWorkers=3).fit(frame(spark))
    after = streams(spark)
    both = before.keys() & after.keys()
    assert both, "no process was used again"
    assert [after[pid] for pid in both] == [before[pid] for pid in both]
