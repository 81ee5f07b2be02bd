"""Params that cannot work are refused when they are set, or before any worker takes a step."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from every_row import every
from frames import Refuse, estimator, frame
from pyspark.sql import SparkSession
from torch import nn

from sparkdl import GradientAllReduce, TorchEstimator
from sparkdl.callbacks import EarlyStopping
from sparkdl.errors import ConfigError, SparkDLError
from sparkdl.estimator.params.training import TrainingParams

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
    ("callbacks", [print], "has <built-in function print>"),
]


@every(("name", "value", "words"), WRONG)
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


def test_more_workers_than_slots_are_refused_with_both_numbers(
    spark: SparkSession, refuse: Refuse
) -> None:
    refuse(frame(spark), ConfigError, "numWorkers is 4", "3 slots", "at most 3", numWorkers=4)


def test_speculation_is_refused_with_the_setting_to_change(
    spark: SparkSession, refuse: Refuse
) -> None:
    conf = spark.sparkContext._conf
    before = conf.get("spark.speculation")
    conf.set("spark.speculation", "true")
    try:
        refuse(frame(spark), ConfigError, "spark.speculation=false")
    finally:
        conf.set("spark.speculation", before or "false")


def test_an_output_type_that_the_loss_cannot_give_is_refused_before_training(
    spark: SparkSession, refuse: Refuse
) -> None:
    words = "outputType='probability' needs", "outputType='raw'"
    settings = {"model": nn.Linear(4, 1), "loss": nn.MSELoss(), "outputType": "probability"}
    refuse(frame(spark), ConfigError, *words, **settings)
