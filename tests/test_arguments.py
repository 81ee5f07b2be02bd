"""A number is a number, whoever's type it has; a bool is none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import sparkdl
from sparkdl import strategies
from sparkdl.arguments import as_number, as_whole, counted, require_seed
from sparkdl.callbacks import EarlyStopping, TimeBudget
from sparkdl.checkpoint.object_spec import save_object
from sparkdl.errors import ConfigError
from sparkdl.large_batches import LARS

FIVES: list[Any] = [5, 5.0, np.int8(5), np.uint64(5), np.float16(5), np.longdouble(5), np.array(5)]
FIVES += [torch.tensor(5), torch.tensor(5.0), Decimal(5), Fraction(5)]
NO_NUMBERS: list[Any] = [True, np.True_, torch.tensor(True), "5", None, 5j, [5], np.array([5])]
NOT_FINITE: list[Any] = [math.nan, -math.inf, np.float32("inf"), Decimal("sNaN"), 10**400]


def estimator(**params: Any) -> sparkdl.TorchEstimator:
    return sparkdl.TorchEstimator(
        model=nn.Linear, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1), **params
    )


@pytest.mark.parametrize("five", FIVES, ids=lambda each: type(each).__name__)
def test_every_kind_of_five_is_five(five: Any) -> None:
    for found in (as_whole(five), as_number(five)):
        assert found == 5
        assert type(found) in (int, float)
    assert type(as_whole(five)) is int


def test_what_is_no_finite_number_is_none() -> None:
    for value in [*NO_NUMBERS, *NOT_FINITE]:
        assert as_number(value) is None, value
    for value in [*NO_NUMBERS, 5.5, np.float32(0.5), *NOT_FINITE[:-1]]:
        assert as_whole(value) is None, value


def test_params_hold_pythons_own_numbers() -> None:
    names = ["batchSize", "epochs", "memoryBudget", "timeout", "clipNorm", "keepLast", "seed"]
    given = dict(zip(names, [np.int32(5), 5.0, torch.tensor(5), *[Decimal(5)] * 4], strict=True))
    made = estimator(
        **given,
        validationFraction=np.float32(0.25),
        padCols={"f": np.int8(5)},
        columnShapes={"f": [5.0, torch.tensor(5)]},
        outputCols={"p": np.int64(1)},
        progress=np.False_,
        featuresCols=np.array(["a", "b"]),
        labelCols=pd.Index(["c", "d"]),
    )
    values = {name: made.getOrDefault(name) for name in names}
    assert json.loads(json.dumps(values)) == dict.fromkeys(names, 5)
    assert made.getValidationFraction() == 0.25
    assert repr((made.getPadCols(), made.getColumnShapes())) == "({'f': 5}, {'f': [5, 5]})"
    assert made.getProgress() is False
    assert (made.getOutputCols(), made.getFeaturesCols()) == ({"p": 1}, ["a", "b"])
    assert (made.getLabelCols(), type(made.getFeaturesCols()[0])) == (["c", "d"], str)


def test_params_refuse_what_is_no_number_by_name_when_it_is_set() -> None:
    for name in ("batchSize", "timeout", "clipNorm", "validationFraction", "numWorkers", "seed"):
        for value in (True, np.True_, "5", math.nan, math.inf):
            with pytest.raises(ConfigError, match=f"{name} must be"):
                estimator(**{name: value})
    for value in (1, "yes", np.float32(1), None):
        with pytest.raises(ConfigError, match="dropLast must be True or False"):
            estimator(dropLast=value)
    for seed in (2**63, -(2**63) - 1, 0.5):  # Spark, torch or numpy would refuse it later
        with pytest.raises(ConfigError, match=r"seed must be .* -2\*\*63 and < 2\*\*63"):
            estimator(seed=seed)
    for seed in (-(2**63), -1, 2**63 - 1, np.uint64(7)):
        assert estimator(seed=seed).getSeed() == require_seed("seed", seed)


def test_texts_and_thresholds_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r'param "labelCol"\. .*NoneType'):
        estimator(labelCol=None)
    classifier = partial(sparkdl.TorchClassifier, model=nn.Linear, optimizer="SGD")
    for given in ([np.float32(0.5), Decimal("0.5")], np.array([0.5, 0.5])):
        assert classifier(thresholds=given).getThresholds() == [0.5, 0.5]
    for wrong in (["a", "b"], 0.5, [0.5, math.nan], [0.5, True]):
        with pytest.raises(ConfigError, match="thresholds must be a list of finite numbers"):
            classifier(thresholds=wrong)


def test_strategies_and_callbacks_hold_pythons_own_numbers(tmp_path: Path) -> None:
    makers: list[Callable[[Any, Any], Any]] = [
        lambda one, two: strategies.ParameterAveraging(period=two),
        lambda one, two: strategies.ParameterAveraging(cutoff=one),
        lambda one, two: strategies.GossipAveraging(period=two),
        lambda one, two: strategies.GradientAllReduce(accumulate=two),
        lambda one, two: strategies.PowerSGD(two, start_after=one),
        lambda one, two: strategies.PSSP(two, one),
        lambda one, two: strategies.OuterOptimizer(period=((one, two), (two, two)), fragments=one),
        lambda one, two: EarlyStopping(patience=two),
        lambda one, two: TimeBudget(two),
    ]
    for make in makers:
        for number in (np.int64, torch.tensor):
            made = make(number(1), number(2))
            assert repr(made) == repr(make(1, 2))
            assert "pickle" not in str(save_object(made, tmp_path, "strategy"))


def test_strategies_callbacks_and_optimizers_refuse_bools_as_numbers() -> None:
    for make in (
        lambda: strategies.ParameterAveraging(period=True),
        lambda: strategies.GradientAllReduce(bucket_mb=np.True_),
        lambda: strategies.GradientAllReduce(bucket_mb=math.inf),
        lambda: EarlyStopping(min_delta=True),
        lambda: TimeBudget(True),
        lambda: LARS([torch.zeros(1)], lr=True),
    ):
        with pytest.raises(ConfigError, match="must be"):
            make()
    assert strategies.GradientAllReduce(sync_batch_norm=np.True_).sync_batch_norm is True
    assert LARS([torch.zeros(1)], lr=np.float32(0.5)).defaults["lr"] == 0.5


def test_counts_agree_with_their_nouns() -> None:
    assert [counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    found = [counted(2, noun) for noun in ("class", "minibatch", "epoch")]
    assert found == ["2 classes", "2 minibatches", "2 epochs"]
