"""A fit with a loss that is no plain mean over rows equals plain torch on all of the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from frames import estimator
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl import GradientAllReduce
from sparkdl.errors import ConfigError, ModelError

ROWS, STEPS, IGNORED = 24, 4, -100
FEATURES = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
CLASSES = (np.arange(ROWS) >= 18).astype(np.int64)
"""A quarter of the rows are of class 1: all on the second worker."""
NUMBERS = FEATURES.sum(axis=1) + 1
SGD = partial(torch.optim.SGD, lr=0.2)


def zeros(outputs: int) -> nn.Module:
    module = nn.Linear(3, outputs)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def squeezed(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs.squeeze(1) - targets) ** 2).mean()


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    """(id, features, class int, number double), in two partitions."""
    columns = zip(range(ROWS), FEATURES.tolist(), CLASSES.tolist(), NUMBERS.tolist(), strict=True)
    schema = "id int, features array<float>, class int, number double"
    whole = spark.createDataFrame(list(columns), schema)
    return whole.repartitionByRange(2, "id").sortWithinPartitions("id").cache()


def fit(rows: DataFrame, outputs: int, loss: Any, label: str, **changes: Any) -> Any:
    """All rows in every step, two workers."""
    settings: dict[str, Any] = {
        "strategy": GradientAllReduce(),
        "optimizer": SGD,
        "epochs": STEPS,
        "batchSize": ROWS,
        "shuffleRows": "none",
    }
    fitted = estimator(
        model=partial(zeros, outputs), loss=loss, labelCol=label, **{**settings, **changes}
    )
    return fitted.fit(rows)


def by_torch(outputs: int, loss: Callable[..., Tensor], labels: np.ndarray) -> nn.Module:
    module = zeros(outputs)
    optimizer = SGD(module.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(module(torch.from_numpy(FEATURES)), torch.from_numpy(labels)).backward()
        optimizer.step()
    return module


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(mine, theirs, atol=1e-5) for mine, theirs in pairs)


def test_a_loss_of_ones_own_gets_targets_as_in_the_column(rows: DataFrame) -> None:
    fitted = fit(rows, 1, squeezed, "number")
    assert same(fitted.module, by_torch(1, squeezed, NUMBERS.astype(np.float32)))


def test_a_loss_that_compares_each_row_with_all_targets_is_refused(rows: DataFrame) -> None:
    with pytest.raises(ModelError, match=r"broadcasts shape \(11, 1\) with \(11,\) to \(11, 11\)"):
        fit(rows, 1, lambda outputs, targets: (outputs - targets).square().mean(), "number")


def test_the_loss_of_held_out_rows_does_not_depend_on_how_those_without_a_label_lie(
    rows: DataFrame,
) -> None:
    some = rows.withColumn("class", F.when(F.col("id") % 4 < 2, IGNORED).otherwise(F.col("class")))
    held_out = some.withColumn("held", F.expr("id % 3 = 0"))
    expected = functional.cross_entropy(
        zeros(2)(torch.from_numpy(FEATURES))[::3],
        torch.from_numpy(np.where(np.arange(ROWS) % 4 < 2, IGNORED, CLASSES))[::3],
    ).item()
    fitted = fit(
        held_out,
        2,
        nn.CrossEntropyLoss(),
        "class",
        batchSize=2,
        epochs=1,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        validationIndicatorCol="held",
    )
    assert fitted.history[-1].validation_loss == pytest.approx(expected, rel=1e-5)


def test_weights_of_any_unit_train_the_same(rows: DataFrame) -> None:
    small = rows.withColumn("w", F.lit(1e-46))
    expected = by_torch(1, nn.MSELoss(), NUMBERS.astype(np.float32)[:, None])
    assert same(fit(small, 1, nn.MSELoss(), "number", weightCol="w").module, expected)


def test_a_sum_over_rows_is_refused_for_several_workers_and_added_up_for_one(
    rows: DataFrame,
) -> None:
    loss = nn.MSELoss(reduction="sum")
    with pytest.raises((ConfigError, ModelError), match="sum"):
        fit(rows, 1, loss, "number")
    found = fit(
        rows.repartition(1),
        1,
        loss,
        "number",
        numWorkers=1,
        optimizer=partial(torch.optim.SGD, lr=0.2 / ROWS),
        batchSize=ROWS // 2,
        strategy=GradientAllReduce(accumulate=2),
    )
    assert same(found.module, by_torch(1, nn.MSELoss(), NUMBERS.astype(np.float32)[:, None]))


def test_a_fit_within_inference_mode_trains(rows: DataFrame) -> None:
    with torch.inference_mode():
        fitted = fit(rows, 1, nn.MSELoss(), "number")
    assert same(fitted.module, by_torch(1, nn.MSELoss(), NUMBERS.astype(np.float32)[:, None]))
