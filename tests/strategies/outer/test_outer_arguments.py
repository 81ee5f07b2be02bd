"""OuterOptimizer's arguments, and how it is written down."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every
from interruptions import same_bits
from torch import Tensor, nn
from trainings import DATA, job

from sparkdl import strategies
from sparkdl.checkpoint.identity import text_of
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


@every(
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
)
def test_outer_momentum_on_inner_momentum_is_warned_of_with_the_remedy(
    strategy: Strategy[Any], optimizer: Any, remedy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    strategy.require_fits(Replica(nn.Linear(2, 1), optimizer, nn.MSELoss()))
    if remedy is None:
        assert not caplog.records
    else:
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert remedy in caplog.text
