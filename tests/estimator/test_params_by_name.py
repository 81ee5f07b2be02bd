"""Copies of an estimator with other Params, which may be given by name."""

from __future__ import annotations

from typing import Any

import pytest
from every_row import every
from frames import estimator

from sparkdl import GradientAllReduce, ParameterAveraging
from sparkdl.errors import ConfigError


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
