"""No Param is without effect: each changes what workers, driver or model are told to do.

What those then do with it is tested where they are. A new Param fails the first test until it is
listed here, with a value that changes something or among those that tests elsewhere show.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from every_row import every
from frames import WIDTH, frame
from pyspark.ml.param import Param
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from sparkdl import (
    GradientAllReduce,
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from sparkdl.callbacks import TimeBudget
from sparkdl.checkpoint.identity import describe
from sparkdl.estimator.checks.preflight import plan_fit
from sparkdl.estimator.head import Head
from sparkdl.protocols import Batch

STAGES = (
    TorchEstimator,
    TorchClassifier,
    TorchRegressor,
    TorchModel,
    TorchClassificationModel,
    TorchRegressionModel,
)


def same(batch: Batch) -> Batch:
    return batch


METRICS = {"a": MulticlassAccuracy(3), "b": MulticlassF1Score(3)}
HELD_OUT = {"validationFraction": 0.5}
FOLLOWED = {
    **HELD_OUT,
    "metrics": METRICS,
    "scheduler": partial(ReduceLROnPlateau, mode="max"),
    "schedulerMetric": "a",
}
SAVED = {"checkpointPath": "somewhere"}
CHANGES: dict[str, Any] = {
    "batchSize": 11,
    "batchTransform": same,
    "callbacks": [TimeBudget(5.0)],
    "checkpointEvery": 3,
    "checkpointPath": "elsewhere",
    "checkpointRounds": 4,
    "clipNorm": 2.0,
    "collectiveInterface": "lo",
    "collectivePorts": "40000-40100",
    "columnDtypes": {"features": "float64"},
    "columnShapes": {"features": [WIDTH]},
    "device": "cpu",
    "dropLast": True,
    "epochs": 2,
    "featuresAs": "dict",
    "featuresCol": "other",
    "featuresCols": ["features", "other"],
    "handleInvalid": "keep",
    "keepLast": 5,
    "labelCol": "second",
    "learningRate": 0.25,
    "labelCols": ["label", "second"],
    "loss": nn.NLLLoss(),
    "maxFailures": 1,
    "metrics": {"a": METRICS["a"]},
    "minWorkers": 2,
    "model": nn.Linear(WIDTH, 3),
    "numWorkers": 1,
    "optimizer": torch.optim.Adam,
    "precision": "bf16",
    "predictionCol": "mine",
    "reshuffleEvery": 1,
    "resume": "never",
    "scheduler": partial(StepLR, step_size=1),
    "schedulerEvery": "step",
    "schedulerMetric": "b",
    "seed": 8,
    "shipModules": False,
    "shuffleRows": "none",
    "storeIn": "memory",
    "strategy": GradientAllReduce(),
    "timeout": 240.0,
    "tls": True,
    "validationFraction": 0.5,
    "validationIndicatorCol": "held",
    "weightCol": "weight",
}
"""What each becomes in an estimator, of which the rest stays as it is."""
BEFORE: dict[str, dict[str, Any]] = {
    "checkpointEvery": SAVED,
    "checkpointPath": SAVED,
    "checkpointRounds": SAVED,
    "keepLast": SAVED,
    "metrics": {**HELD_OUT, "metrics": METRICS},
    "resume": SAVED,
    "schedulerEvery": {"scheduler": partial(StepLR, step_size=1)},
    "schedulerMetric": FOLLOWED,
}
"""Without which some could have no effect."""
OF_OUTPUTS: dict[str, tuple[type, Any]] = {
    "labels": (TorchClassifier, [1.5, 2.5, 3.5]),
    "outputCols": (TorchEstimator, {"prediction": "a", "other": "b"}),
    "outputType": (TorchEstimator, "probability"),
    "probabilityCol": (TorchClassifier, "mine"),
    "rawPredictionCol": (TorchClassifier, "mine"),
    "thresholds": (TorchClassifier, [0.1, 0.2, 0.7]),
}
"""Those that decide which columns come of which outputs."""
OF_PREDICTING: dict[str, Any] = {
    "predictBatchSize": 7,
    "predictCompiled": True,
    "predictDevice": "cpu",
    "predictPrecision": "bfloat16",
    "predictionDtype": "float32",
}
ELSEWHERE = {
    *("imageCols", "imageFit", "imageScale", "imageSize", "groupByLength", "padCols", "padInputs"),
    *("progress", "lossCol"),
}
"""Those that no fit on these rows could show, and that tests of images and sequences do."""


def params_of(stage: type) -> set[str]:
    return {name for name in dir(stage) if isinstance(getattr(stage, name, None), Param)}


def test_every_param_is_listed_once_with_what_shows_its_effect() -> None:
    listed = [*CHANGES, *OF_OUTPUTS, *OF_PREDICTING, *ELSEWHERE]
    assert len(set(listed)) == len(listed)
    assert set().union(*map(params_of, STAGES)) == set(listed)


def stage(kind: Any = TorchEstimator, **changes: Any) -> Any:
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(WIDTH, 3)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "numWorkers": 2,
    }
    return kind(**{**settings, **changes})


def text(value: Any) -> str:
    return json.dumps(describe(value), sort_keys=True)


def told(estimator: TorchEstimator, rows: DataFrame) -> dict[str, str]:
    """What a fit tells those who act: by whom and what, for comparison."""
    plan, _ = plan_fit(estimator, rows)
    settings = plan.settings
    job = {field.name: text(getattr(plan.job, field.name)) for field in fields(plan.job)}
    apart = {"frame", "delivery", "columns"}
    workers = {
        field.name: text(getattr(plan.workers, field.name))
        for field in fields(plan.workers)
        if field.name not in apart
    }
    return {
        **job,
        **workers,
        "delivery": repr(plan.workers.delivery),
        "columns": text([column.name for column in plan.workers.columns]),
        "checkpoints": repr(settings.checkpoint_policy("application")),
        "callbacks in the driver": text(settings.driver_callbacks),
        "not finite": text(settings.handle_invalid),
        "predicted": text([each.name for each in estimator.predicted_columns(plan.head, WIDTHS)]),
    }


WIDTHS = {None: 3, "a": 3, "b": 2}


@pytest.mark.nightly
def test_each_changes_what_a_fit_tells_workers_and_driver(spark: SparkSession) -> None:
    rows = frame(spark).select(
        "*",
        F.col("features").alias("other"),
        F.col("label").alias("second"),
        (F.col("id") % 2 == 0).alias("held"),
        F.lit(2.0).alias("weight"),
    )
    known: dict[str, dict[str, str]] = {}
    without = []
    for name, value in CHANGES.items():
        before = BEFORE.get(name, {})
        key = repr(sorted(before))
        if key not in known:
            known[key] = told(stage(**before), rows)
            assert known[key] == told(stage(**before), rows)  # else all would seem to have one
        if told(stage(**{**before, name: value}), rows) == known[key]:
            without.append(name)
    assert without == []


def columns(kind: Any, **changes: Any) -> Any:
    made = stage(kind, **changes).predicted_columns(Head.LOGITS, WIDTHS)
    outputs = torch.tensor([[2.0, 1.0, 0.5], [0.0, 0.5, 0.1]])
    return [(each.name, each.key, each.function(outputs).tolist()) for each in made]


@every("name", OF_OUTPUTS)
def test_each_changes_the_columns_of_the_outputs(name: str) -> None:
    kind, value = OF_OUTPUTS[name]
    assert columns(kind, **{name: value}) != columns(kind)


@every("name", OF_PREDICTING)
def test_each_changes_how_a_model_predicts(name: str) -> None:
    model = TorchModel.from_module(nn.Linear(2, 2), torch.zeros(1, 2))
    before = model.prediction_settings()
    assert model._set(**{name: OF_PREDICTING[name]}).prediction_settings() != before
