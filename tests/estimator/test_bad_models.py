"""Models, losses and optimizers that cannot work are refused before any worker takes a step."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from every_row import every
from frames import Refuse, estimator, frame
from models import Net, TwoTables
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from sparkdl.errors import ModelError
from sparkdl.strategies import GradientAllReduce


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    """Some that have every column of the cases."""
    return frame(spark).select(
        "*",
        (F.col("id") % 6).alias("carrier"),
        (F.col("id") % 5 - 1).alias("negative"),
        F.col("label").cast("double").alias("double"),
    )


def no_such_layer() -> nn.Module:
    raise LookupError("no such layer")


class Pair(nn.Linear):
    def forward(self, features: Tensor) -> Any:
        return super().forward(features), features


class Mean(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features).mean(dim=0)


class HoldsALock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].guard = threading.Lock()


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.LazyLinear(4)


TABLES = TwoTables(entries=5)
IN_ONE_PARTITION = "'carrier' from 0 (row 0 of partition 0) to 5 (row 5 of partition 0)"
UNTRAINED = "no parameter that requires a gradient"
MODELS: list[tuple[Any, dict[str, Any], list[str]]] = [
    (
        nn.Linear(5, 3),
        {},
        ["the model fails on a batch with features of float32 (2, 4)", "(2x4 and 5"],
    ),
    (TwoTables(), {}, ["float32 (2, 4)", "features"]),
    (
        TABLES,
        {"featuresCols": ["carrier", "features"], "numWorkers": 3},
        ["features of int64 (2,), float32 (2, 4)", IN_ONE_PARTITION, "index out of range"],
    ),
    (
        TABLES,
        {"featuresCols": ["negative", "features"]},
        ["'negative' from -1 (row", "out of r"],
    ),
    (no_such_layer, {}, ["cannot be built", "LookupError", "no such layer"]),
    (lambda: "a model", {}, ["nn.Module"]),
    (nn.Linear(4, 3).requires_grad_(False), {}, [UNTRAINED]),
    (nn.Identity(), {}, [UNTRAINED]),
    (lambda: Pair(4, 3), {}, ["a tuple of 0 float32 (2, 3)"]),
    (lambda: Mean(4, 3), {}, ["returns shape (3,)", "must be the rows"]),
    (HoldsALock(), {}, ["model cannot be sent", "model.layers.1.guard", "lock"]),
    (Unused, {}, ["lazy layers", "calls it on a batch of zeros"]),
    # Two rows of two outputs would broadcast against two targets, with no more than a warning.
    (nn.Linear(4, 2), {"loss": nn.MSELoss()}, ["outputs float32 (2, 2) and targets float32 (2,)"]),
    (nn.Linear(4, 3), {"loss": nn.MSELoss()}, ["outputs float32 (2, 3) and targets float32 (2,)"]),
    # The labels go up to 2; it is not they that are wrong.
    (
        nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))),
        {"loss": nn.CrossEntropyLoss()},
        ["The model returns shape (2, 3) for each row", "(rows, classes)"],
    ),
]


@every(("model", "changes", "fragments"), MODELS)
def test_a_model_that_cannot_work_is_refused_with_why(
    rows: DataFrame, refuse: Refuse, model: Any, changes: dict[str, Any], fragments: list[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refuse(rows, ModelError, *fragments, model=model, **changes)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.nll_loss(outputs.log_softmax(dim=1), targets)


def detached(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.detach().mean()


def of_all_pairs(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    values = (outputs.reshape(-1, 1) - targets.reshape(1, -1)) ** 2
    return values.mean() if reduction == "mean" else values


def guarded() -> Any:
    guard = threading.Lock()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with guard:
            return nn.functional.cross_entropy(outputs, targets)

    return loss


ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=5)
OTHERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"loss": nn.CrossEntropyLoss(reduction="none")}, ["must be a scalar tensor", "(2,)"]),
    ({"loss": lambda o, t: 1.0}, ["scalar tensor", "float"]),
    (
        {"loss": own_loss, "labelCol": "double"},
        ["the loss fails on outputs float32 (2, 3) and targets float32 (2,)", "'double'", "Long"],
    ),
    ({"loss": detached}, ["backward pass", "does not require grad"]),
    (
        {"model": nn.Linear(4, 1), "loss": of_all_pairs, "scoreCol": "error"},
        ["scoreCol need a loss with one value per row, but for 5 rows it gives (5, 5)"],
    ),
    ({"loss": guarded()}, ["loss cannot be sent", "'guard'", "lock"]),
    ({"optimizer": torch.optim.LBFGS}, ["optimizer", "closure"]),
    ({"optimizer": partial(torch.optim.SGD, lr=-1.0)}, ["Invalid learning rate: -1.0"]),
    (
        {"optimizer": partial(torch.optim.SGD, lr=0.1, hook=threading.Lock())},
        ["optimizer cannot be sent", "optimizer.keywords['hook']"],
    ),
    (
        {"scheduler": partial(lr_scheduler.StepLR, step=3)},
        ["scheduler cannot be built: TypeError"],
    ),
    (
        {"scheduler": lr_scheduler.ReduceLROnPlateau, "schedulerEvery": "step"},
        ["schedulerEvery='epoch'"],
    ),
    (
        {"scheduler": ONE_CYCLE, "schedulerEvery": "step", "epochs": 2},
        ["OneCycleLR ends after total_steps=5, but this training takes 6 of its steps"],
    ),
]


@every(("changes", "fragments"), OTHERS)
def test_a_loss_an_optimizer_or_a_schedule_that_cannot_work_is_refused_with_why(
    rows: DataFrame, refuse: Refuse, changes: dict[str, Any], fragments: list[str]
) -> None:
    refuse(rows, ModelError, *fragments, **changes)


def test_a_model_that_cannot_train_on_the_one_row_that_is_left_is_refused(
    spark: SparkSession, refuse: Refuse
) -> None:
    """Two workers have 31 rows each, and minibatches of 10; together two are left, or one of 61."""
    rows = frame(spark, rows=62, partitions=2)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    refuse(rows, ModelError, "of one row, which a worker with 31 rows has", "dropLast", model=model)
    estimator(model=model, dropLast=True).fit(rows)
    estimator(model=model, batchSize=9).fit(rows)
    together = GradientAllReduce(sync_batch_norm=True)
    estimator(model=model, strategy=together, epochs=1).fit(rows)
    refuse(
        frame(spark, rows=61, partitions=2),
        ModelError,
        "of one row, which a worker with 31 rows has",
        model=model,
        strategy=together,
    )
