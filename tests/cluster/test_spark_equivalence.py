"""Fits on executors equal one process, and repeat their bits."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from frames import CLASSES, estimator, features_of, frame, labels_of, same_bits
from models import RowIds, minibatches
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl import ParameterAveraging, TorchModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EPOCHS = 3


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


@pytest.mark.versions
def test_recorded_minibatches_replayed_in_one_process_give_the_same_parameters(
    spark: SparkSession, tmp_path: Path
) -> None:
    trace, rows = tmp_path / "ids", 47
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
    assert relative_error(fitted.module.layers, before) > 1e-3  # it was trained at all
    assert relative_error(fitted.module.layers, oracle) <= 1e-6
    assert [epoch.examples for epoch in fitted.history] == [rows, rows]


def with_backbone() -> nn.Module:
    backbone = nn.Linear(4, 16).requires_grad_(False)
    return nn.Sequential(backbone, nn.Tanh(), nn.Linear(16, CLASSES)).double()


@pytest.mark.gate
def test_a_fitted_model_has_the_backbone_that_every_executor_has_built(
    spark: SparkSession,
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


def fit(frame: DataFrame, seed: int = 7) -> TorchModel:
    def model() -> nn.Module:  # local, because executors cannot import this module
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    return estimator(model=model, numWorkers=3, epochs=2, seed=seed).fit(frame)


def joined(spark: SparkSession) -> DataFrame:
    weights = spark.range(0, 90, 1, 4).select("id", (F.col("id") % 7).alias("weight"))
    return frame(spark, rows=90, partitions=5).join(weights.hint("shuffle_hash"), "id")


@pytest.mark.gate
def test_two_fits_with_one_seed_agree_to_the_bit_after_a_shuffle(spark: SparkSession) -> None:
    assert same_bits(fit(joined(spark)), fit(joined(spark)))


def test_two_fits_agree_to_the_bit_whatever_order_rows_arrive_in_and_another_seed_differs(
    spark: SparkSession,
) -> None:
    rows = frame(spark, rows=90, partitions=3)
    before = torch.random.get_rng_state()
    first = fit(rows)
    assert torch.equal(torch.random.get_rng_state(), before), "a fit has drawn in the driver"
    assert same_bits(first, fit(rows.sortWithinPartitions(F.desc("id"))))
    assert not same_bits(first, fit(rows, seed=8))


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


@pytest.mark.gate
def test_the_users_other_jobs_do_not_draw_what_a_fit_has_seeded(spark: SparkSession) -> None:
    estimator(numWorkers=3).fit(frame(spark))
    before = streams(spark)
    estimator(numWorkers=3).fit(frame(spark))
    after = streams(spark)
    both = before.keys() & after.keys()
    assert both, "no process was used again"
    assert [after[pid] for pid in both] == [before[pid] for pid in both]
