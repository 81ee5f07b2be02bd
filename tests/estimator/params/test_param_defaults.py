"""Only what the user gave counts as set; everything else is a default, also after save and load."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import Net
from torch import nn

from sparkdl import ParameterAveraging, TorchEstimator

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
