"""Ten random faults of five kinds in one training; ``benchmarks/chaos.py`` does a hundred."""

from __future__ import annotations

import multiprocessing
import sys
import time
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from toys import classification, make_job, mlp, sparkdl_threads

from sparkdl.averager import members
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing.chaos import Chaos

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [60, 44, 52]
EPOCHS = 10


class Slow(nn.Module):
    """Takes its time, so that there is a middle of the training for the faults to fall into."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, features: Tensor) -> Tensor:
        time.sleep(0.02)
        return self.net(features)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "strategy",
    [ParameterAveraging(period=1), pytest.param(GradientAllReduce(), marks=pytest.mark.slow)],
    ids=["averaging", "all-reduce"],
)
def test_no_row_is_lost_or_counted_twice_under_ten_random_faults(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    monkeypatch.setattr(members, "STRAGGLER_S", 1.0)
    job = make_job(
        Slow(),
        epochs=EPOCHS,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        strategy=strategy,
        max_failures=100,
    )
    chaos = Chaos(job, classification(SIZES).shards(), seed=1, faults=10)
    outcome = chaos.run()
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * EPOCHS
    assert outcome.history[-1].loss < 0.8 * outcome.history[0].loss
    assert len(chaos.storm.injected) == 10
    assert multiprocessing.active_children() == []
    deadline = time.monotonic() + 5
    while sparkdl_threads() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sparkdl_threads() == []
