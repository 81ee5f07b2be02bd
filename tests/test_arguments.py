"""A number is a number, whoever's type it has; a bool is none."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import sparkdl
from sparkdl import strategies
from sparkdl.arguments import LISTED, as_number, as_whole, counted, listed, require_seed
from sparkdl.callbacks import EarlyStopping, TimeBudget
from sparkdl.checkpoint.object_spec import save_object
from sparkdl.errors import ConfigError, ModelError
from sparkdl.large_batches import LARS
from sparkdl.outputs import pick

FIVES: list[Any] = [
    *(5, 5.0, np.int8(5), np.uint64(5), np.float16(5), np.longdouble(5), np.array(5)),
    *(torch.tensor(5), torch.tensor(5.0), Decimal(5), Fraction(5)),
]
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


@pytest.mark.parametrize("five", [np.int32(5), 5.0, torch.tensor(5), Decimal(5)], ids=repr)
def test_params_hold_pythons_own_numbers(five: Any) -> None:
    names = ["batchSize", "epochs", "timeout", "clipNorm", "keepLast", "seed"]
    made = estimator(
        **dict.fromkeys(names, five),
        validationFraction=np.float32(0.25),
        padCols={"f": five},
        columnShapes={"f": [five, five]},
        outputCols={"p": np.int64(1)},
        progress=np.False_,
        featuresCols=np.array(["a", "b"]),
        labelCols=pd.Index(["c", "d"]),
    )
    values = {name: made.getOrDefault(name) for name in names}
    assert json.loads(json.dumps(values)) == dict.fromkeys(names, 5)
    assert made.getValidationFraction() == 0.25
    assert repr(made.getPadCols()) in ("{'f': 5}", "{'f': 5.0}")
    assert repr(made.getColumnShapes()) == "{'f': [5, 5]}"
    assert made.getProgress() is False
    assert (made.getOutputCols(), made.getFeaturesCols()) == ({"p": 1}, ["a", "b"])
    assert (made.getLabelCols(), type(made.getFeaturesCols()[0])) == (["c", "d"], str)


def test_params_refuse_what_is_no_number_by_name_when_it_is_set() -> None:
    for name in ("batchSize", "timeout", "clipNorm", "validationFraction", "numWorkers", "seed"):
        for value in (True, np.True_, "5", math.nan, math.inf):
            with pytest.raises(ConfigError, match=f"{name} must be"):
                estimator(**{name: value})
    model = sparkdl.TorchModel.from_module(nn.Linear(1, 1), torch.zeros(1, 1))
    for name in ("progress", "dropLast", "tls", "groupByLength", "predictCompiled"):
        for value in (1, "yes", np.float32(1), None):
            with pytest.raises(ConfigError, match=f"{name} must be True or False"):
                (model if name == "predictCompiled" else estimator())._set(**{name: value})


def test_texts_and_thresholds_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r'param "labelCol"\. .*NoneType'):
        estimator(labelCol=None)
    built = {"model": nn.Linear, "loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD}
    classifier = partial(sparkdl.TorchClassifier, **built)
    for given in ([np.float32(0.5), Decimal("0.5")], np.array([0.5, 0.5])):
        assert classifier(thresholds=given).getThresholds() == [0.5, 0.5]
    for wrong in (["a", "b"], 0.5, [0.5, math.nan], [0.5, True]):
        with pytest.raises(ConfigError, match="thresholds must be a list of finite numbers"):
            classifier(thresholds=wrong)


def test_seeds_that_spark_torch_or_numpy_would_refuse_are_refused_when_set() -> None:
    for seed in (2**63, 2**64, -(2**63) - 1, 0.5):
        with pytest.raises(ConfigError, match=r"seed must be .* -2\*\*63 and < 2\*\*63"):
            estimator(seed=seed)
    for seed in (-(2**63), -1, 2**63 - 1, np.uint64(7)):
        assert estimator(seed=seed).getSeed() == require_seed("seed", seed)


NUMBERS = {"numpy": np.int64, "float": float, "torch": torch.tensor, "numpy32": np.float32}


@pytest.mark.parametrize("given", NUMBERS.values(), ids=NUMBERS)
def test_strategies_and_callbacks_hold_pythons_own_numbers(given: Any, tmp_path: Any) -> None:
    one, two = given(1), given(2)
    for made, plain in [
        (strategies.ParameterAveraging(period=two), strategies.ParameterAveraging(period=2)),
        (strategies.ParameterAveraging(cutoff=one), strategies.ParameterAveraging(cutoff=1)),
        (strategies.GossipAveraging(period=two), strategies.GossipAveraging(period=2)),
        (strategies.GradientAllReduce(accumulate=two), strategies.GradientAllReduce(accumulate=2)),
        (strategies.PowerSGD(two, start_after=one), strategies.PowerSGD(2, start_after=1)),
        (strategies.PSSP(two, one), strategies.PSSP(2, 1)),
        (
            strategies.OuterOptimizer(period=((one, two), (two, two)), fragments=one),
            strategies.OuterOptimizer(period=((1, 2), (2, 2)), fragments=1),
        ),
        (EarlyStopping(patience=two), EarlyStopping(patience=2)),
        (TimeBudget(two), TimeBudget(2)),
    ]:
        # float 2.0 where a float is declared stays one.
        assert repr(made) in (repr(plain), repr(plain).replace("seconds=2", "seconds=2.0"))
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


def test_a_message_lists_the_first_of_thousands_of_names() -> None:
    names = [f"c{index}" for index in range(10_000)]
    assert listed(iter(names[:3])) == "c0, c1, c2"
    assert listed(names).endswith(f", c{LISTED - 1} and {10_000 - LISTED} more")
    outputs = dict.fromkeys(names, torch.zeros(2))
    with pytest.raises(ModelError, match=r"and 9950 more. Choose which of them transform adds"):
        pick(outputs, None, 2)


def test_counts_agree_with_their_nouns() -> None:
    assert [counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    for noun, nouns in (("class", "classes"), ("minibatch", "minibatches"), ("epoch", "epochs")):
        assert counted(2, noun) == f"2 {nouns}"
