"""Params that cannot work are refused when they are set, or before any worker takes a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from frames import Refuse, estimator, frame
from pyspark.sql import SparkSession
from torch import nn

from sparkdl import GradientAllReduce, ParameterAveraging, TorchEstimator
from sparkdl.errors import ConfigError, SparkDLError


@pytest.mark.parametrize("name", ["batchSize", "epochs", "numWorkers"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True, "4"])
def test_a_count_below_one_or_not_whole_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be a whole number >= 1, got {value!r}"):
        estimator(**{name: value})


@pytest.mark.parametrize("name", ["batchSize", "epochs", "numWorkers"])
def test_a_setter_refuses_what_the_constructor_refuses(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number >= 1, got 0"):
        getattr(estimator(), "set" + name[0].upper() + name[1:])(0)


@pytest.mark.parametrize("name", ["batchSize", "epochs"])
def test_none_is_refused_where_there_is_no_default(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number >= 1, got None"):
        estimator(**{name: None})


@pytest.mark.parametrize("value", ["40000", "2-1", "0-10", "1-70000", 40000, (1, 2), ""])
def test_ports_that_are_no_range_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="collectivePorts must be two ports such as '40000-401"):
        estimator(collectivePorts=value)


@pytest.mark.parametrize("value", ["", 7, ["eth1"]])
def test_an_interface_that_is_no_name_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="collectiveInterface must be a network interface such"):
        estimator(collectiveInterface=value)


def test_more_workers_than_slots_are_refused_with_both_numbers(
    spark: SparkSession, refuse: Refuse
) -> None:
    refuse(frame(spark), ConfigError, "numWorkers is 4", "3 slots", "at most 3", numWorkers=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": GradientAllReduce()}, "agree on the number of steps before the first"),
        ({"strategy": ParameterAveraging(aggregation="executors")}, "aggregation='driver'"),
        ({"weightCol": "label"}, "cannot be combined with weightCol"),
    ],
    ids=["all-reduce", "executors", "weights"],
)
def test_streaming_is_refused_where_all_rows_have_to_be_known_first(
    spark: SparkSession, refuse: Refuse, changes: dict[str, Any], message: str
) -> None:
    refuse(
        frame(spark),
        ConfigError,
        "streamFirstEpoch cannot be combined with",
        message,
        streamFirstEpoch=True,
        **changes,
    )


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("batch_size", "batchSize"), ("num_workers", "numWorkers"), ("epoch", "epochs")],
)
def test_an_unknown_param_is_answered_with_the_one_that_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"no parameter '{wrong}'\. Did you mean '{meant}'\? It has: model, loss"
    ):
        estimator(**{wrong: 3})


def test_an_unknown_param_like_no_other_is_answered_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"no parameter 'zzz'\. It has: model, loss"):
        estimator(zzz=3)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("outputType", "logits", "auto, class, probability, raw"),
        ("precision", "fp16", "float32, bf16"),
        ("device", "gpu", "auto, cpu, cuda or cuda:N"),
        ("timeout", 0, "a number > 0"),
        ("clipNorm", 0, "a number > 0"),
        ("clipNorm", "1", "a number > 0"),
        ("timeout", float("nan"), "a number > 0"),
        ("featuresCols", "features", "a list of column names"),
        ("featuresCols", [], "a list of column names"),
        ("model", 3, "an nn.Module or a function that builds one"),
        ("loss", "mse", r"a function of \(outputs, targets\), or 'model'"),
        ("optimizer", 0.1, "a function of the model's parameters"),
        ("strategy", "average", r"ParameterAveraging\(period=5\)"),
    ],
)
def test_a_value_of_the_wrong_kind_is_answered_with_what_fits(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*{allowed}"):
        estimator(**{name: value})


@pytest.mark.parametrize("value", [{}, ["logits"], {"p": -1}, {"p": True}, {"p": None}])
def test_outputs_that_are_neither_names_nor_positions_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="outputCols must give for each column the name of the"):
        estimator(outputCols=value)


def test_a_column_that_is_no_name_is_refused_by_its_param() -> None:
    with pytest.raises((SparkDLError, TypeError), match="labelCol"):
        estimator(labelCol=3)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(TypeError, match="'optimizer'"):
        TorchEstimator(model=nn.Linear(1, 1), loss=nn.MSELoss())


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


@pytest.mark.slow_variants
@pytest.mark.parametrize("output_type", ["class", "probability"])
def test_an_output_type_that_the_loss_cannot_give_is_refused(
    spark: SparkSession, refuse: Refuse, output_type: str
) -> None:
    """Not after an hour of training, in ``transform``."""
    refuse(
        frame(spark),
        ConfigError,
        f"outputType='{output_type}' needs",
        "outputType='raw'",
        model=nn.Linear(4, 1),
        loss=nn.MSELoss(),
        outputType=output_type,
    )


@pytest.mark.parametrize(
    ("optimizer", "got"),
    [
        (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), "one of type SGD"),
        ("adam", "'adam'"),
    ],
)
def test_an_optimizer_that_is_no_function_is_answered_with_an_example(
    optimizer: Any, got: str
) -> None:
    with pytest.raises(ConfigError, match=rf"partial\(torch.optim.SGD, lr=0.1\), got {got}"):
        estimator(optimizer=optimizer)


def test_a_strategy_whose_parentheses_were_forgotten_is_named_as_a_class() -> None:
    with pytest.raises(ConfigError, match="got the class GradientAllReduce itself"):
        estimator(strategy=GradientAllReduce)
