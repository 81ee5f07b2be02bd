"""Params that are refused, and those of callbacks and recovery."""

from __future__ import annotations

import os
import re
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from every_row import every_row
from frames import Refuse, estimator, frame, no_jobs, same_bits
from models import Net, Traced, lines
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl import GradientAllReduce, TorchEstimator
from sparkdl.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    WorkerCallback,
    WorkerStep,
)
from sparkdl.errors import ConfigError, ModelError, SparkDLError
from sparkdl.estimator.params.training import TrainingParams
from sparkdl.protocols import Batch

SGD = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
COUNTS = (
    ["batchSize", "epochs", "numWorkers", "checkpointEvery", "checkpointRounds", "keepLast"],
    [0, -3, 1.5, True, "4"],
)
A_NUMBER, A_LIST = "a number > 0", "a list of column names"
FRACTION, PADDING = "a number between 0 and 1", "give for each column the number"
PORTS, INTERFACE = "two ports such as '40000-401", "a network interface such"
OUTPUTS = "give for each column the name of the"
WRONG: list[tuple[str, Any, str]] = [
    *(
        (name, value, f"a whole number >= 1, got {value!r}")
        for name in COUNTS[0]
        for value in COUNTS[1]
    ),
    *((name, None, "a whole number >= 1, got None") for name in ("batchSize", "epochs")),
    *(
        ("collectivePorts", value, PORTS)
        for value in ("40000", "2-1", "0-10", "1-70000", 40000, (1, 2), "")
    ),
    *(("collectiveInterface", value, INTERFACE) for value in ("", 7, ["eth1"])),
    *(("outputCols", value, OUTPUTS) for value in ({}, ["a"], {"p": -1}, {"p": True}, {"p": None})),
    *(
        ("validationFraction", value, FRACTION)
        for value in (0, 1, 1.5, -0.1, "0.2", True, float("nan"))
    ),
    *(("checkpointPath", value, f"a path or URI, got {value!r}") for value in ("", 3)),
    *(("padCols", value, PADDING) for value in ({"x": "0"}, {"x": float("nan")}, {})),
    ("padInputs", {"x": "mask"}, "one of padding_mask, attention_mask, lengths"),
    ("columnShapes", {"x": [2, None]}, "None for the length"),
    ("resume", "yes", "one of auto, never, got 'yes'"),
    ("outputType", "logits", "auto, class, probability, raw"),
    ("precision", "fp16", "float32, bf16"),
    ("device", "gpu", "auto, cpu, cuda or cuda:N"),
    ("timeout", 0, A_NUMBER),
    ("timeout", float("nan"), A_NUMBER),
    ("clipNorm", 0, A_NUMBER),
    ("clipNorm", "1", A_NUMBER),
    ("featuresCols", "features", A_LIST),
    ("featuresCols", [], A_LIST),
    ("schedulerMetric", 3, "a name"),
    ("model", 3, "an nn.Module or a function that builds one"),
    ("loss", "mse", "a function of (outputs, targets), or 'model'"),
    *(
        ("loss", value, "got the class CrossEntropyLoss itself: call it, CrossEntropyLoss(...)")
        for value in (nn.CrossEntropyLoss, partial(nn.CrossEntropyLoss, label_smoothing=0.1))
    ),
    ("optimizer", 0.1, "a function of the model's parameters"),
    ("optimizer", SGD, "such as 'Adam', got one of type SGD"),
    ("optimizer", "adam", "such as 'Adam', got 'adam'. Did you mean 'Adam'?"),
    ("optimizer", "os.system", "such as 'Adam', got 'os.system'"),
    *(("learningRate", value, A_NUMBER) for value in (0, -1.0, "0.1", True, float("inf"))),
    ("batchTransform", nn.Identity, "got the class Identity itself: call it"),
    ("strategy", "average", "ParameterAveraging(period=5)"),
    ("strategy", GradientAllReduce, "got the class GradientAllReduce itself"),
    ("callbacks", EarlyStopping(), "a list"),
    ("callbacks", [EarlyStopping], "has the class EarlyStopping: call it"),
    (
        "callbacks",
        [ModelCheckpoint(), EarlyStopping("accuracy")],
        "ModelCheckpoint keeps the best by 'validation_loss', and EarlyStopping by 'accuracy'",
    ),
    ("callbacks", [print], "has <built-in function print>"),
]


@every_row(*WRONG)
def test_a_wrong_value_is_answered_with_its_param_and_what_fits(
    name: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} must .*{re.escape(words)}"):
        estimator(**{name: value})


def test_a_setter_refuses_what_the_constructor_refuses() -> None:
    with pytest.raises(ConfigError, match="epochs must be a whole number >= 1, got 0"):
        estimator().setEpochs(0)
    with pytest.raises((SparkDLError, TypeError), match="labelCol"):
        estimator(labelCol=3)
    with pytest.raises(ConfigError, match=r"got 2\..* sparkdl\.run"):
        TrainingParams.optimizer.typeConverter([torch.optim.SGD, torch.optim.Adam])


def test_an_argument_that_is_unknown_or_missing_is_answered_with_those_there_are() -> None:
    meant = {"batch_size": "batchSize", "num_workers": "numWorkers", "epoch": "epochs"}
    for wrong, right in meant.items():
        words = rf"no parameter '{wrong}'\. Did you mean '{right}'\? It has: model, loss"
        with pytest.raises(ConfigError, match=words):
            estimator(**{wrong: 3})
    with pytest.raises(ConfigError, match=r"no parameter 'zzz'\. It has: model, loss"):
        estimator(zzz=3)
    with pytest.raises(TypeError, match="'optimizer'"):
        TorchEstimator(model=nn.Linear(1, 1), loss=nn.MSELoss())


@every_row(
    ({"numWorkers": 4}, "numWorkers is 4.*3 slots.*at most 3"),
    ({"minWorkers": 3}, "minWorkers is 3, but this fit has 2 workers"),
)
def test_more_workers_than_there_can_be_are_refused_with_both_numbers(
    spark: SparkSession, changes: dict[str, Any], words: str
) -> None:
    with no_jobs(spark), pytest.raises(ConfigError, match=words):
        estimator(**changes).fit(frame(spark))


def test_speculation_is_refused_with_the_setting_to_change(spark: SparkSession) -> None:
    conf = spark.sparkContext._conf
    before = conf.get("spark.speculation")
    conf.set("spark.speculation", "true")
    try:
        with no_jobs(spark), pytest.raises(ConfigError, match=r"spark\.speculation=false"):
            estimator().fit(frame(spark))
    finally:
        conf.set("spark.speculation", before or "false")


def test_workers_that_spark_would_kill_as_idle_are_refused_with_the_setting_to_change(
    spark: SparkSession,
) -> None:
    """Spark reads both settings where it plans a function of batches."""
    own = "spark.sql.execution.pyspark.udf"
    try:
        spark.conf.set(f"{own}.killOnIdleTimeout", "true")
        spark.conf.set(f"{own}.idleTimeoutSeconds", "3600")
        words = r"hears nothing of for 3600 s.* spark\.sql\S+\.killOnIdleTimeout=false"
        with no_jobs(spark), pytest.raises(ConfigError, match=words):
            estimator().fit(frame(spark))
    finally:
        spark.conf.unset(f"{own}.killOnIdleTimeout")
        spark.conf.unset(f"{own}.idleTimeoutSeconds")


def test_an_output_type_that_the_loss_cannot_give_is_refused_before_training(
    spark: SparkSession, refuse: Refuse
) -> None:
    words = "outputType='probability' needs", "outputType='raw'"
    refuse(frame(spark), ConfigError, *words, loss=nn.MultiMarginLoss(), outputType="probability")


cloudpickle.register_pickle_by_value(sys.modules[__name__])


class MyOwn(Callback):
    """What a user may write."""


class Steps(WorkerCallback):
    """Leaves a file for each rank and step, which only a worker's process can."""

    def __init__(self, directory: str, driver: int) -> None:
        self.directory = directory
        self.driver = driver

    def after_step(self, step: WorkerStep) -> None:
        assert os.getpid() != self.driver
        Path(self.directory, f"{step.rank}-{step.step}").touch()


def test_one_of_ones_own_needs_trust(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "estimator")
    estimator(model=Net, callbacks=[MyOwn(), Steps("here", 0)]).write().save(path)
    with pytest.raises(ConfigError, match="callbacks was saved as a pickle"):
        TorchEstimator.load(path, trust=["models"])
    mine, steps = TorchEstimator.load(path, trust=True).getCallbacks()
    assert isinstance(mine, MyOwn)
    assert isinstance(steps, Steps)
    assert steps.directory == "here"


def test_one_that_cannot_travel_to_the_workers_is_told_of(spark: SparkSession) -> None:
    with pytest.raises(ModelError, match=r"callbacks cannot be sent .* callbacks\[0\]\.driver"):
        estimator(callbacks=[Steps("here", threading.Lock())]).fit(frame(spark))  # type: ignore[arg-type]


def test_none_takes_them_away() -> None:
    assert estimator(callbacks=[MyOwn()]).setCallbacks(None).getCallbacks() is None
    assert estimator(callbacks=None).driver_callbacks() == []


def test_there_are_no_checkpoints_unless_asked_for() -> None:
    assert estimator().checkpoint_policy() is None


def smooth_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def same_batch(batch: Batch) -> Batch:
    return batch


def test_a_fit_goes_on_from_a_checkpoint_of_the_same_training_only(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And holds the same rows out. For a daily job another one's is yesterday's model."""
    rows, trace, held = frame(spark), tmp_path / "trace", {"validationFraction": 0.3}
    settings: dict[str, Any] = {**held, "checkpointPath": str(tmp_path / "checkpoints")}
    first = estimator(epochs=1, **settings).fit(rows)
    assert same_bits(estimator(epochs=1, timeout=250.0, **settings).fit(rows), first)
    assert "already ended with epoch 1: its model is returned without another step" in caplog.text
    resumed = estimator(epochs=2, **settings).fit(rows)
    assert same_bits(resumed, estimator(epochs=2, **held).fit(rows))
    assert [row.epoch for row in resumed.history] == [1, 2]

    others: dict[str, Any] = {
        "batchSize": 3,
        "loss": smooth_loss,
        "clipNorm": 0.5,
        "precision": "bf16",
        "batchTransform": same_batch,
        "weightCol": "id",
        "labelCol": "id",
        "model": Traced(str(trace)),
        "validationFraction": 0.4,
    }
    said = [
        "batch size: was 10, is now 3",
        "loss: was CrossEntropyLoss(), is now smooth_loss",
        "clip norm: was none, is now 0.5",
        "precision: was float32, is now bf16",
        "batch transform: was None, is now same_batch",
        "weight: was none, is now id (float64)",
        "label: was label (int64), is now id (int64)",
        "model: was Sequential, is now Traced",
        "indicator: was validationFraction=0.3 (bool), is now validationFraction=0.4",
    ]
    changed = rows.withColumn("features", F.reverse("features"))
    refused: list[tuple[DataFrame, dict[str, Any], list[str]]] = [
        (rows, others, said),
        (changed, {}, ["the training rows have different values"]),
        (frame(spark, rows=64), {}, ["rows of each partition: was ["]),
    ]
    for given, changes, told in refused:
        with pytest.raises(ConfigError) as caught:
            estimator(**{"epochs": 3, **settings, **changes}).fit(given)
        assert [line for line in told if line not in str(caught.value)] == []
    assert lines(trace) == []


def test_a_directory_that_cannot_be_made_fails_before_training(
    spark: SparkSession, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    with pytest.raises(ConfigError, match="checkpointPath '/dev/null/x' cannot be used"):
        estimator(checkpointPath="/dev/null/x", model=Traced(str(trace))).fit(frame(spark))
    assert lines(trace) == []


def test_one_callback_keeps_the_best_model_while_another_ends_the_training() -> None:
    both = [ModelCheckpoint(), EarlyStopping("accuracy", restore_best=False)]
    assert estimator(callbacks=both).getCallbacks() == both
