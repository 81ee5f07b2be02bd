"""Models, losses and optimizers that cannot work are refused before any worker takes a step."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from frames import Refuse, estimator, frame
from models import Net, TwoTables
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl.errors import ModelError


def test_a_model_of_another_width_is_refused_with_the_shapes(
    spark: SparkSession, refuse: Refuse
) -> None:
    refuse(
        frame(spark),
        ModelError,
        "the model fails on a batch with features of float32 (2, 4)",
        "(2x4 and 5x3)",
        model=nn.Linear(5, 3),
    )


def test_a_model_of_two_arguments_given_one_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    refuse(frame(spark), ModelError, "float32 (2, 4)", "features", model=TwoTables())


def test_an_index_beyond_the_embedding_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    refuse(
        frame(spark).withColumn("carrier", F.col("id") % 6),
        ModelError,
        "features of int64 (2,), float32 (2, 4)",
        "'carrier' from 0 (row 0 of partition 0) to 5 (row 5 of partition 0)",
        "index out of range",
        model=TwoTables(entries=5),
        featuresCols=["carrier", "features"],
        numWorkers=3,
    )


def test_a_negative_index_into_an_embedding_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    refuse(
        frame(spark).withColumn("carrier", F.col("id") % 5 - 1),
        ModelError,
        "'carrier' from -1 (row",
        "index out of range",
        model=TwoTables(entries=5),
        featuresCols=["carrier", "features"],
    )


def test_a_model_that_cannot_be_built_is_refused_with_its_own_error(
    spark: SparkSession, refuse: Refuse
) -> None:
    def build() -> nn.Module:
        raise LookupError("no such layer")

    refuse(frame(spark), ModelError, "cannot be built", "LookupError", "no such layer", model=build)


def test_a_builder_that_returns_no_module_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    refuse(frame(spark), ModelError, "nn.Module", model=lambda: "a model")


def test_a_frozen_model_is_refused_for_having_nothing_to_train(
    spark: SparkSession, refuse: Refuse
) -> None:
    model = nn.Linear(4, 3).requires_grad_(False)
    refuse(frame(spark), ModelError, "no parameter that requires a gradient", model=model)


def test_a_model_without_parameters_is_refused_for_having_nothing_to_train(
    spark: SparkSession, refuse: Refuse
) -> None:
    refuse(frame(spark), ModelError, "no parameter that requires a gradient", model=nn.Identity())


def test_a_model_that_returns_a_tuple_is_refused_by_a_loss_of_one_tensor(
    spark: SparkSession, refuse: Refuse
) -> None:
    class Pair(nn.Linear):
        def forward(self, features: Tensor) -> Any:
            return super().forward(features), features

    refuse(frame(spark), ModelError, "a tuple of 0 float32 (2, 3)", model=lambda: Pair(4, 3))


def test_a_model_that_loses_the_rows_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    class Mean(nn.Linear):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features).mean(dim=0)

    refuse(
        frame(spark), ModelError, "returns shape (3,)", "must be the rows", model=lambda: Mean(4, 3)
    )


def test_a_loss_that_is_no_scalar_is_refused_with_its_shape(
    spark: SparkSession, refuse: Refuse
) -> None:
    refuse(
        frame(spark),
        ModelError,
        "must be a scalar tensor",
        "(2,)",
        loss=nn.CrossEntropyLoss(reduction="none"),
    )


def test_a_loss_that_returns_a_float_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    refuse(frame(spark), ModelError, "scalar tensor", "float", loss=lambda o, t: 1.0)


def test_a_custom_loss_given_targets_of_another_dtype_is_refused_with_both(
    spark: SparkSession, refuse: Refuse
) -> None:
    def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.nll_loss(outputs.log_softmax(dim=1), targets)

    refuse(
        frame(spark).withColumn("label", F.col("label").cast("double")),
        ModelError,
        "the loss fails on outputs float32 (2, 3) and targets float32 (2,)",
        "'label'",
        "Long",
        loss=own_loss,
    )


@pytest.mark.parametrize("outputs", [2, 3])
def test_outputs_and_targets_of_unlike_shapes_are_refused_for_a_regression(
    spark: SparkSession, refuse: Refuse, outputs: int
) -> None:
    """Two rows of two outputs would broadcast against two targets, with no more than a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refuse(
            frame(spark),
            ModelError,
            f"outputs float32 (2, {outputs}) and targets float32 (2,)",
            loss=nn.MSELoss(),
            model=nn.Linear(4, outputs),
        )


def test_a_loss_without_a_gradient_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    def detached(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.detach().mean()

    refuse(frame(spark), ModelError, "backward pass", "does not require grad", loss=detached)


def test_an_optimizer_that_needs_a_closure_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    refuse(frame(spark), ModelError, "optimizer", "closure", optimizer=torch.optim.LBFGS)


def test_a_scheduler_that_cannot_be_built_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    bad = partial(torch.optim.lr_scheduler.StepLR, step=3)
    refuse(frame(spark), ModelError, "scheduler cannot be built: TypeError", scheduler=bad)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    refuse(
        frame(spark),
        ModelError,
        "schedulerEvery='epoch'",
        scheduler=plateau,
        schedulerEvery="step",
    )


def test_an_optimizer_with_a_bad_setting_is_refused_with_its_own_error(
    spark: SparkSession, refuse: Refuse
) -> None:
    optimizer = partial(torch.optim.SGD, lr=-1.0)
    refuse(frame(spark), ModelError, "Invalid learning rate: -1.0", optimizer=optimizer)


class HoldsALock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].guard = threading.Lock()


def test_a_model_that_cannot_be_pickled_is_refused_by_its_attribute(
    spark: SparkSession, refuse: Refuse
) -> None:
    refuse(
        frame(spark),
        ModelError,
        "model cannot be sent",
        "model.layers.1.guard",
        "lock",
        model=HoldsALock(),
    )


def test_a_loss_that_cannot_be_pickled_is_refused_by_its_variable(
    spark: SparkSession, refuse: Refuse
) -> None:
    guard = threading.Lock()

    def guarded(outputs: Tensor, targets: Tensor) -> Tensor:
        with guard:
            return nn.functional.cross_entropy(outputs, targets)

    refuse(frame(spark), ModelError, "loss cannot be sent", "'guard'", "lock", loss=guarded)


def test_an_optimizer_that_cannot_be_pickled_is_refused_by_its_argument(
    spark: SparkSession, refuse: Refuse
) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1, hook=threading.Lock())
    refuse(
        frame(spark),
        ModelError,
        "optimizer cannot be sent",
        "optimizer.keywords['hook']",
        optimizer=optimizer,
    )


def test_lazy_layers_that_no_forward_pass_reaches_are_refused(
    spark: SparkSession, refuse: Refuse
) -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.LazyLinear(4)

    refuse(frame(spark), ModelError, "lazy layers", "calls it on a batch of zeros", model=Unused)


def test_a_schedule_that_ends_before_the_training_is_refused(
    spark: SparkSession, refuse: Refuse
) -> None:
    refuse(
        frame(spark),
        ModelError,
        "OneCycleLR ends after total_steps=5, but this training takes 6 of its steps",
        scheduler=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=5),
        schedulerEvery="step",
        epochs=2,
    )


def test_a_model_that_cannot_train_on_the_one_row_that_is_left_is_refused(
    spark: SparkSession, refuse: Refuse
) -> None:
    """Two workers have 31 rows each, and minibatches of 10."""
    rows = frame(spark, rows=62, partitions=2)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    refuse(rows, ModelError, "of one row, which a worker with 31 rows has", "dropLast", model=model)
    estimator(model=model, dropLast=True).fit(rows)
    estimator(model=model, batchSize=9).fit(rows)
