"""Losses, optimizers and held-out rows of fits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from every_row import every, every_row
from frames import built, estimator, frame, no_jobs
from models import append_line, lines, task_rank
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from sparkdl import LARS, GradientAllReduce
from sparkdl.errors import ConfigError, ModelError
from sparkdl.estimator.checks.building import LazyModelError
from sparkdl.estimator.checks.preflight import (
    require_rate_counts,
    require_steady_state,
    require_steps,
)
from sparkdl.replica import Replica
from sparkdl.spark.rows.columns import held_out_fraction, input_column

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
    with no_jobs(rows.sparkSession), pytest.raises((ConfigError, ModelError), match="sum"):
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


class GrowsAt(torch.optim.SGD):
    """Keeps a copy of the parameters from a step on."""

    def __init__(self, parameters: Any, step: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.left = step

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.left -= 1
        for parameter in self.param_groups[0]["params"] if self.left <= 0 else ():
            self.state[parameter]["slow"] = parameter.detach().clone()


def in_groups(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight], **settings}, {"params": [bias], "lr": 0.5}])


class TurnsMomentumOn(lr_scheduler.LambdaLR):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 3:
            self.optimizer.param_groups[0]["momentum"] = 0.9


@every_row(
    *(
        (partial(GrowsAt, step=step), None, r"GrowsAt has .*'slow'.*average_optimizer_state")
        for step in (2, 6)
    ),
    (SGD, TurnsMomentumOn, "SGD has grown.*'momentum_buffer'"),
)
def test_what_makes_an_optimizers_state_grow_late_is_refused_by_what_grows(
    optimizer: Any, scheduler: Any, told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        require_steady_state(optimizer, scheduler)


@every_row(
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    torch.optim.Adam,
    torch.optim.ASGD,
    # which only the real model can try out
    torch.optim.LBFGS,
    torch.optim.SparseAdam,
    torch.optim.Muon,
)
def test_other_optimizers_pass(optimizer: Any) -> None:
    require_steady_state(optimizer, None)
    require_steady_state(optimizer, partial(lr_scheduler.StepLR, step_size=3))
    # Schedules that turn momentum on at once.
    sgd = partial(torch.optim.SGD, lr=0.1)
    require_steady_state(sgd, partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=7))
    require_steady_state(sgd, partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.3))


def test_a_schedule_shorter_than_the_training_is_refused_with_both_lengths() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=7)
    with pytest.raises(ModelError, match=r"OneCycleLR ends after total_steps=7.* takes 8 "):
        require_steps(optimizer, one_cycle, 8)
    require_steps(optimizer, one_cycle, 7)
    require_steps(optimizer, partial(lr_scheduler.StepLR, step_size=3), 8)
    require_steps(optimizer, None, 8)


@every("several", [tuple, list])
def test_several_optimizers_are_refused_with_where_to_write_such_a_loop(several: Any) -> None:
    def optimizers(parameters: Any) -> Any:
        parameters = list(parameters)
        return several(torch.optim.SGD(half, lr=0.1) for half in (parameters[:1], parameters[1:]))

    with pytest.raises(ModelError, match=rf"builds a {several.__name__};.* sparkdl\.run"):
        built(lambda: nn.Linear(2, 2), optimizer=optimizers)


def test_lazy_layers_are_told_from_other_models() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())

    with pytest.raises(LazyModelError, match="calls it on a batch of zeros"):
        built(model)


def rates(optimizer: Any, **others: Any) -> list[float]:
    """Of a network of one layer, for learningRate=0.25, once all is checked."""
    settings = estimator(optimizer=optimizer, learningRate=0.25, **others)
    replica = Replica(nn.Linear(2, 2), settings.optimizer_builder(), nn.MSELoss())
    require_rate_counts(settings, replica, 0.25)
    return [group["lr"] for group in replica.optimizer.param_groups]


@every_row(
    (torch.optim.Adam, [0.25]),
    ("Adam", [0.25]),
    ("torch.optim.SGD", [0.25]),
    ("sparkdl.LARS", [0.25]),
    (partial(torch.optim.SGD, lr=3.0, momentum=0.9), [0.25]),
    (in_groups, [0.25, 0.5]),
)
def test_the_learning_rate_wins_over_the_optimizers_own(optimizer: Any, expected: Any) -> None:
    assert rates(optimizer) == expected
    warm_up = partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: step / 10)
    assert rates(optimizer, scheduler=warm_up) == expected


def takes_none(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def ignores_it(parameters: Any, **_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@every_row(
    ({"optimizer": takes_none}, r"takes_none takes only \(parameters\). Give it an"),
    ({"optimizer": ignores_it}, "ignores_it sets lr in each of its parameter groups"),
    (
        {
            "optimizer": "SGD",
            "scheduler": partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=9),
        },
        r"OneCycleLR\(max_lr=1.0, total_steps=9\) sets lr by itself",
    ),
)
def test_a_learning_rate_that_changes_nothing_is_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"learningRate=0.25 .*{words}"):
        rates(**settings)


def test_an_optimizer_without_a_rate_is_answered_with_the_param_that_gives_one() -> None:
    with pytest.raises(ModelError, match=r"'lr'\. Give the optimizer .* learningRate"):
        built(lambda: nn.Linear(2, 2), optimizer=LARS)


cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Sides(nn.Module):
    """Records in evaluation mode which ids it sees, and in training mode too."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.layer = nn.Linear(4, 3)

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        if task_rank() >= 0:
            side = "train" if self.training else "held"
            append_line(self.path, " ".join(map(str, [side, *ids.tolist()])))
        return self.layer(features)


def sides(trace: Path, rows: DataFrame, **changes: Any) -> tuple[set[int], set[int], Any]:
    """The ids that one fit has trained on and those that it has validated with."""
    trace.unlink(missing_ok=True)
    settings = {"model": Sides(str(trace)), "featuresCols": ["features", "id"], **changes}
    fitted = estimator(validationFraction=0.25, **settings).fit(rows)
    seen: dict[str, set[int]] = {"train": set(), "held": set()}
    for line in lines(trace):
        side, *ids = line.split()
        seen[side] |= set(map(int, ids))
    return seen["train"], seen["held"], fitted


def chosen(rows: DataFrame, names: list[str], fraction: float, seed: int = 0) -> list[int]:
    columns = tuple(input_column(rows, name, "featuresCols") for name in names)
    held = rows.where(held_out_fraction(columns, fraction, seed).expression())
    return sorted(row.id for row in held.select("id").collect())


def test_every_row_is_on_one_side_and_the_same_for_any_workers_partitions_and_strategy(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows, trace = frame(spark, rows=120), tmp_path / "trace"
    trained, held, fitted = sides(trace, rows, epochs=2)
    assert trained | held == set(range(120))
    assert not trained & held
    assert [epoch.validation_examples for epoch in fitted.history] == [len(held)] * 2
    assert [epoch.examples for epoch in fitted.history] == [len(trained)] * 2
    assert sorted(held) == chosen(rows, ["features", "id", "label"], 0.25, seed=7)
    other = rows.repartition(5).orderBy(F.desc("id"))
    strategy = GradientAllReduce()
    again = sides(trace, other, strategy=strategy, numWorkers=3, shuffleRows="spark")
    assert again[:2] == (trained, held)


def test_the_fraction_is_the_wanted_one_and_a_larger_one_only_adds_rows(
    spark: SparkSession,
) -> None:
    rows, before = spark.range(20_000), set[int]()
    for fraction in (0.001, 0.5, 0.999):
        held = chosen(rows, ["id"], fraction)
        deviation = (20_000 * fraction * (1 - fraction)) ** 0.5
        assert abs(len(held) - 20_000 * fraction) < 5 * deviation
        assert before <= set(held)
        before = set(held)
    assert chosen(rows, ["id"], 0.1, seed=1) != chosen(rows, ["id"], 0.1, seed=2)


def test_rows_of_every_type_can_be_told_apart(spark: SparkSession) -> None:
    rows = spark.createDataFrame(
        [(i, Vectors.dense([i, 1]), bytes([i]), [[float(i)]]) for i in range(100)],
        ["id", "vector", "binary", "nested"],
    )
    for name in ("vector", "binary", "nested"):
        assert 25 < len(chosen(rows, [name], 0.5)) < 75


def test_equal_rows_are_on_one_side_which_is_said(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    rows = frame(spark, rows=8).crossJoin(spark.range(50).select(F.lit(1).alias("one")))
    fitted = estimator(validationFraction=0.4).fit(rows)
    assert (fitted.history[0].validation_examples or 0) % 50 == 0
    assert "rows with the same content are on the same side" in caplog.text


def test_what_makes_no_sense_is_refused(spark: SparkSession) -> None:
    rows = frame(spark).withColumn("held", F.col("id") % 2 == 0)
    both = "validationFraction=0.2 and validationIndicatorCol='held' both say which rows"
    with no_jobs(spark), pytest.raises(ConfigError, match=both):
        estimator(validationFraction=0.2, validationIndicatorCol="held").fit(rows)
