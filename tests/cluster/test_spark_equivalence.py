"""Fits on executors equal one process, and repeat their bits."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from frames import (
    CLASSES,
    configured,
    estimator,
    features_of,
    frame,
    frame_of_sizes,
    in_files,
    labels_of,
    same_bits,
    with_features,
)
from models import RowIds, minibatches, task_rank
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl import ColorTrees, GradientAllReduce, ParameterAveraging, TorchModel
from sparkdl.errors import ModelError
from sparkdl.strategies import Strategy

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EPOCHS = 3


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def cnn() -> nn.Module:
    """Rows of 36 numbers are images of 6 x 6."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


def sgd(model: nn.Module, steps: Iterable[list[int]], width: int) -> nn.Module:
    """Plain SGD at 0.1, one step for each list of row ids; in float64."""
    module = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for ids in steps:
        optimizer.zero_grad()
        outputs = module(torch.from_numpy(features_of(ids, width)))
        nn.functional.cross_entropy(outputs, torch.from_numpy(labels_of(ids))).backward()
        optimizer.step()
    return module


def relative_error(module: nn.Module, oracle: nn.Module) -> float:
    pairs = zip(module.parameters(), oracle.parameters(), strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(("build", "width"), [(mlp, 4), (cnn, 36)], ids=["mlp", "cnn"])
def test_whole_shards_as_batches_equal_gradient_descent_on_all_rows_in_float64(
    spark: SparkSession, workers: int, build: type[nn.Module], width: int
) -> None:
    model = build()
    rows = frame(spark, rows=60, partitions=workers, width=width)

    fitted = estimator(
        model=model.double(),
        strategy=ParameterAveraging(period=1),
        epochs=EPOCHS,
        batchSize=60,
        numWorkers=workers,
    ).fit(rows)

    oracle = sgd(build(), [list(range(60))] * EPOCHS, width)
    assert relative_error(fitted.module, build().double()) > 1e-3  # it was trained at all
    assert relative_error(fitted.module, oracle) <= 1e-6


def test_whole_shards_in_float32_equal_gradient_descent_to_float32_precision(
    spark: SparkSession,
) -> None:
    fitted = estimator(
        model=mlp(), strategy=ParameterAveraging(period=1), epochs=EPOCHS, batchSize=60
    ).fit(frame(spark, partitions=2))

    oracle = sgd(mlp(), [list(range(60))] * EPOCHS, 4)
    assert relative_error(fitted.module, oracle) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "of",
    [GradientAllReduce, partial(ParameterAveraging, 3, aggregation="executors")],
    ids=["all-reduce", "averaging"],
)
def test_sums_along_trees_train_on_executors_what_the_ring_trains(
    spark: SparkSession, of: Callable[..., Strategy[Any]]
) -> None:
    settings = {"model": mlp().double(), "epochs": EPOCHS, "batchSize": 7, "numWorkers": 3}
    rows = frame(spark, rows=62, partitions=3).cache()
    ring, trees = (
        estimator(strategy=of(**way), **settings).fit(rows)
        for way in ({}, {"reduction": ColorTrees(2, 0.1)})
    )
    assert relative_error(ring.module, mlp().double()) > 1e-3
    assert relative_error(trees.module, ring.module) <= 1e-6
    assert [epoch.examples for epoch in trees.history] == [62] * EPOCHS


@pytest.mark.parametrize("rows", [60, 47], ids=["equal-shards", "unequal-shards"])
def test_recorded_minibatches_replayed_in_one_process_give_the_same_parameters(
    spark: SparkSession, tmp_path: Path, rows: int
) -> None:
    trace = tmp_path / "ids"
    torch.manual_seed(5)
    model = RowIds(str(trace)).double()
    before = copy.deepcopy(model.layers)

    fitted = estimator(
        model=model,
        featuresCols=["features", "id"],
        strategy=ParameterAveraging(period=1),
        epochs=2,
        batchSize=7,
        numWorkers=3,
    ).fit(frame(spark, rows=rows, partitions=5))

    batches = minibatches(trace)
    steps: list[list[int]] = []
    for epoch in range(2):
        plans = [of_rank[: len(of_rank) // 2] for of_rank in batches.values()]
        if epoch:
            plans = [of_rank[len(of_rank) // 2 :] for of_rank in batches.values()]
        steps += [
            [i for plan in plans if step < len(plan) for i in plan[step]]
            for step in range(max(map(len, plans)))
        ]
    assert len(batches) == 3
    assert sum(map(len, steps)) == 2 * rows
    oracle = sgd(before, steps, 4)
    assert relative_error(fitted.module.layers, oracle) <= 1e-6
    assert [epoch.examples for epoch in fitted.history] == [rows, rows]


def with_backbone(spoilt_on: int | None = None) -> nn.Module:
    backbone = nn.Linear(4, 16).requires_grad_(False)
    with torch.no_grad():
        backbone.weight[2, 2] += task_rank() == spoilt_on
    return nn.Sequential(backbone, nn.Tanh(), nn.Linear(16, CLASSES)).double()


def test_a_fitted_model_has_the_backbone_that_every_executor_has_built(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = frame(spark, rows=60, partitions=3)
    fitted = estimator(
        model=with_backbone,
        strategy=ParameterAveraging(period=1),
        epochs=EPOCHS,
        batchSize=60,
        numWorkers=3,
        seed=7,
    ).fit(rows)

    torch.manual_seed(7)
    drawn = with_backbone()
    oracle = sgd(drawn, [list(range(60))] * EPOCHS, 4)
    assert torch.equal(fitted.module[0].weight, drawn[0].weight)
    torch.testing.assert_close(fitted.module[2].weight, oracle[2].weight, rtol=1e-6, atol=0)
    expected = oracle(torch.from_numpy(features_of(range(60)))).argmax(dim=1).tolist()
    fitted.save(str(tmp_path / "model"))
    for model in (fitted, TorchModel.load(str(tmp_path / "model"), trust=True)):
        found = {row["id"]: row["prediction"] for row in model.transform(rows).collect()}
        assert [found[number] for number in range(60)] == expected


def test_an_executor_with_another_backbone_is_named_with_its_host(spark: SparkSession) -> None:
    with pytest.raises(
        ModelError, match=r"rank 1 on \S+ built the model with different frozen parameter"
    ):
        estimator(model=partial(with_backbone, 1), numWorkers=3).fit(
            frame(spark, rows=30, partitions=3)
        )


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
