"""Params: what counts as set and what is a default, copies with others, and their text."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every
from frames import estimator
from models import Net
from torch import nn

from sparkdl import GradientAllReduce, ParameterAveraging, TorchEstimator
from sparkdl.callbacks import EarlyStopping
from sparkdl.errors import ConfigError
from sparkdl.estimator.params.settings import LONGEST, described, settings_of

GIVEN: dict[str, Any] = {
    "model": Net,
    "loss": nn.CrossEntropyLoss(),
    "optimizer": partial(torch.optim.SGD, lr=0.1),
}
WITHOUT = {"weightCol", "validationIndicatorCol"}
"""pyspark.ml's own, which have no default."""


def set_params(estimator: TorchEstimator) -> set[str]:
    return {param.name for param in estimator.params if estimator.isSet(param)}


def test_what_was_not_given_is_a_default_and_not_set() -> None:
    estimator = TorchEstimator(**GIVEN, epochs=1, numWorkers=None)
    assert set_params(estimator) == {*GIVEN, "epochs", "numWorkers"}
    signature = inspect.signature(TorchEstimator.__init__).parameters
    defaults = {
        name: parameter.default
        for name, parameter in signature.items()
        if name not in {"self", *GIVEN, *WITHOUT}
    }
    defaults["strategy"] = ParameterAveraging()
    assert {p.name for p in estimator.params if estimator.hasDefault(p)} == set(defaults)
    cleared = TorchEstimator(**GIVEN)
    assert {name: cleared.getOrDefault(name) for name in defaults} == defaults


def test_a_param_that_is_cleared_has_its_default_again() -> None:
    estimator = TorchEstimator(**GIVEN, epochs=7)
    estimator.clear(estimator.epochs)
    assert estimator.getEpochs() == 1
    assert "epochs: passes over the data (>= 1) (default: 1)" in estimator.explainParams()


def test_pysparks_own_params_without_a_default_stay_undefined() -> None:
    estimator = TorchEstimator(**GIVEN, weightCol=None)
    assert not any(estimator.isDefined(name) for name in WITHOUT)
    assert estimator.setWeightCol("w").isSet("weightCol")


def test_what_was_set_and_what_was_not_is_saved(tmp_path: Path) -> None:
    for number, changes in enumerate([{}, {"strategy": ParameterAveraging(), "epochs": 1}]):
        estimator = TorchEstimator(**GIVEN, **changes)
        path = str(tmp_path / str(number))
        estimator.save(path)
        loaded = TorchEstimator.load(path, trust=["models"])
        assert set_params(loaded) == set_params(estimator) == {*GIVEN, *changes}
        assert loaded.getStrategy() == ParameterAveraging()
        assert loaded.hasDefault("strategy")


def test_a_copy_takes_params_by_name_and_by_param() -> None:
    given = estimator()
    copied = given.copy({"numWorkers": 7, given.batchSize: 99})
    assert (copied.getNumWorkers(), copied.getBatchSize()) == (7, 99)
    assert copied.uid == given.uid
    assert given.getBatchSize() != 99
    assert given.copy().getBatchSize() == given.getBatchSize()


def test_a_dict_for_the_strategy_has_what_differs_in_it() -> None:
    given = estimator(strategy=ParameterAveraging(3, average_optimizer_state=False))
    copied = given.copy({"strategy": {"period": 8, "aggregation": "executors"}})
    assert copied.getStrategy() == ParameterAveraging(
        8, average_optimizer_state=False, aggregation="executors"
    )
    assert given.getStrategy().period == 3
    assert given.copy({"strategy": GradientAllReduce()}).getStrategy() == GradientAllReduce()


@every(
    ("params", "message"),
    [
        ({"batchsize": 3}, "TorchEstimator has no parameter 'batchsize'"),
        ({"batchSize": 0}, "batchSize"),
        ({"strategy": {"periods": 3}}, "does not take"),
        ({"strategy": {"period": 0}}, "period"),
    ],
)
def test_what_does_not_fit_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimator().copy(params)


def test_several_params_are_set_by_their_names() -> None:
    given = estimator()
    assert given.setParams(epochs=3, strategy={"period": 8}) is given
    assert (given.getEpochs(), given.getStrategy().period) == (3, 8)
    with pytest.raises(ConfigError, match=r"no parameter 'epoch'\. Did you mean 'epochs'"):
        given.setParams(epoch=3)


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no")


@every(
    ("value", "expected"),
    [
        (3, 3),
        (None, None),
        (True, True),
        ("x" * 1000, "x" * LONGEST),
        (partial(torch.optim.SGD, lr=0.1), "SGD(lr=0.1)"),
        (torch.optim.Adam, "Adam"),
        (nn.Sequential(nn.Linear(1, 1)), "Sequential"),
        (["a", "b"], "['a', 'b']"),
        ([EarlyStopping(patience=2)], None),
        (object(), "object"),
        (Unspeakable(), "Unspeakable"),
    ],
)
def test_a_value_is_described_as_it_was_written(value: Any, expected: Any) -> None:
    found = described(value)
    if isinstance(value, list) and expected is None:
        assert "EarlyStopping(" in str(found)
        assert "patience=2" in str(found)
        return
    assert found == expected


def test_every_param_is_there_and_says_the_same_each_time() -> None:
    def made() -> dict[str, object]:
        return settings_of(
            TorchEstimator(
                model=nn.Linear(2, 1),
                loss=nn.MSELoss(),
                optimizer=partial(torch.optim.SGD, lr=0.5),
                learningRate=0.25,
                strategy=ParameterAveraging(period=3),
            )
        )

    settings = made()
    assert settings == made()
    assert (settings["batchSize"], settings["learningRate"]) == (32, 0.25)
    assert settings["loss"] == "MSELoss"
    assert "period=3" in str(settings["strategy"])
    assert set(settings) >= {"epochs", "seed", "featuresCol", "model", "optimizer"}
