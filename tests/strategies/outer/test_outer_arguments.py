"""OuterOptimizer's arguments, and how it is written down."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import same_bits
from outer import DATA, job, named
from torch import Tensor, nn

from sparkdl import strategies
from sparkdl.checkpoint.identity import text_of
from sparkdl.checkpoint.object_spec import load_object, save_object
from sparkdl.errors import ConfigError
from sparkdl.estimator.persistence import EXPECTED
from sparkdl.large_batches import LARS
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies import (
    AsynchronousOuterOptimizer,
    DelayedNesterov,
    OuterOptimizer,
    OuterSGD,
    Strategy,
)
from sparkdl.testing import run_world


@pytest.mark.parametrize(
    "period",
    [
        *(0, -1, 2.5, "5", None, True),
        *((), (5,), [(1, 5)], ([1, 5],), ((1, 5, 6),)),
        *(((1, 0),), ((1, True),), ((1, 2.5),)),
        *(((0, 5),), ((2, 5),), ((1, 5), (1, 6)), ((1, 5), (9, 6), (3, 7))),
    ],
    ids=repr,
)
def test_a_period_that_is_neither_steps_nor_pairs_by_epoch_is_refused(period: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"period must be a whole number of steps >= 1, .*pairs.*got"
    ):
        OuterOptimizer(period)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0}, r"learning_rate must be a number > 0, got 0"),
        ({"learning_rate": -1.0}, r"learning_rate must be a number > 0, got -1.0"),
        ({"learning_rate": math.inf}, r"learning_rate must be a number > 0, got inf"),
        ({"learning_rate": math.nan}, r"learning_rate must be a number > 0, got nan"),
        ({"learning_rate": "1"}, r"learning_rate must be a number > 0, got '1'"),
        ({"learning_rate": True}, r"learning_rate must be a number > 0, got True"),
        ({"momentum": 1}, r"momentum must be a number >= 0 and < 1, got 1"),
        ({"momentum": -0.1}, r"momentum must be a number >= 0 and < 1, got -0.1"),
        ({"momentum": math.nan}, r"momentum must be a number >= 0 and < 1, got nan"),
        ({"momentum": False}, r"momentum must be a number >= 0 and < 1, got False"),
        ({"nesterov": 1}, r"nesterov must be a bool, got 1"),
    ],
    ids=str,
)
def test_an_outer_rule_out_of_range_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterSGD(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outer": 0.9}, r"outer must be a CenterUpdate such as OuterSGD\(\), got 0.9"),
        ({"outer": OuterSGD}, r"outer must be a CenterUpdate such as OuterSGD\(\), got <class"),
        ({"inner_state": "maintain"}, r"one of keep, average, reset, got 'maintain'"),
        ({"wire_dtype": "int8"}, r"wire_dtype must be one of float32, .*, float4, got 'int8'"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterOptimizer(**arguments)


def test_the_defaults_are_those_of_diloco() -> None:
    assert OuterOptimizer() == OuterOptimizer(500, OuterSGD(0.7, 0.9, True), "keep", "float32")


def test_its_text_is_the_same_in_every_process_and_it_can_be_pickled() -> None:
    strategy = OuterOptimizer(((1, 1), (31, 16)), OuterSGD(1, 0.5))
    assert text_of(strategy) == (
        "OuterOptimizer(period=((1, 1), (31, 16)), outer=OuterSGD(learning_rate=1, momentum=0.5, "
        "nesterov=True), inner_state='keep', wire_dtype='float32', fragments=1, overlap=0, "
        "merge=0.0, cutoff='none')"
    )
    assert pickle.loads(pickle.dumps(strategy)) == strategy


def test_a_saved_estimators_strategy_comes_back_without_trust(tmp_path: Path) -> None:
    strategy = OuterOptimizer(((1, 1), (31, 16)), OuterSGD(1, 0.5), "reset", "bfloat16")
    saved = save_object(strategy, tmp_path, "strategy")
    expected = EXPECTED["strategy"]
    assert load_object(saved, tmp_path, "strategy", expected=expected, trust=False) == strategy
    assert not list(tmp_path.iterdir())


def documented() -> type[Strategy[Any]]:
    """The strategy that the documentation shows how to write."""
    page = Path(__file__).parents[3] / "docs" / "writing-a-strategy.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (source,) = [block for block in blocks if "class OuterMomentum" in block]
    names: dict[str, Any] = {"__name__": __name__, **vars(strategies)}
    names |= {"dataclass": dataclasses.dataclass, "Mapping": Mapping}
    names |= {"Tensor": Tensor, "Batch": Batch}
    exec(source, names)
    return names["OuterMomentum"]  # type: ignore[no-any-return]


def test_the_documented_example_of_a_strategy_does_as_this_one() -> None:
    shown = documented()(period=2, momentum=0.6, rate=0.7)  # type: ignore[call-arg]
    assert same_bits(run_world(job(strategy=shown), DATA.shards()), run_world(job(), DATA.shards()))


def sgd(momentum: float) -> partial[torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=0.1, momentum=momentum)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "remedy"),
    [
        (
            OuterOptimizer(5),
            sgd(0.9),
            "Set inner_state='reset', or an outer momentum of at most 0.5",
        ),
        (OuterOptimizer(8, fragments=2), sgd(0.9), "Set an outer momentum of at most 0.5"),
        (OuterOptimizer(5), partial(LARS, lr=0.1), "inner_state='reset'"),
        (OuterOptimizer(5, OuterSGD(1, 0.6)), sgd(0.1), "times the workers' change"),
        (OuterOptimizer(5, cutoff=1), sgd(0.9), "inner_state='reset'"),
        (
            AsynchronousOuterOptimizer(DelayedNesterov(4, 0.7, 0.9)),
            sgd(0.9),
            "Set an outer momentum",
        ),
        (OuterOptimizer(5, inner_state="reset"), sgd(0.9), None),
        (OuterOptimizer(5, OuterSGD(1, 0.5)), sgd(0.9), None),
        (OuterOptimizer(5), sgd(0.0), None),
        (OuterOptimizer(5), partial(torch.optim.Adam, lr=0.1), None),
        (AsynchronousOuterOptimizer(DelayedNesterov(4)), sgd(0.9), None),
        (AsynchronousOuterOptimizer(DelayedNesterov(4, 0.7, 0.9)), sgd(0.0), None),
    ],
    ids=lambda value: named(value) if isinstance(value, partial) else str(value)[:60],
)
def test_outer_momentum_on_inner_momentum_is_warned_of_with_the_remedy(
    strategy: Strategy[Any],
    optimizer: Any,
    remedy: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy.require_fits(Replica(nn.Linear(2, 1), optimizer, nn.MSELoss()))
    if remedy is None:
        assert not caplog.records
    else:
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert remedy in caplog.text
