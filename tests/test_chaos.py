"""Ten random faults of five kinds in one training; ``benchmarks/chaos.py`` does a hundred.

Whoever is lost, only what was committed has happened: the parameters are those of one process that
trains the committed windows once more.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from functools import partial

import cloudpickle
import pytest
import torch
from support.chaos import Chaos
from support.replay import recorded_commits, relative_difference, replay
from torch import Tensor, nn
from toys import classification, make_job, mlp

from sparkdl.averager.coordination import membership
from sparkdl.driver import Outcome
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [60, 44, 52]
EPOCHS = 10


class Slow(nn.Module):
    """Takes its time, so that there is a middle of the training for the faults to fall into."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, features: Tensor) -> Tensor:
        if multiprocessing.current_process().name.startswith("rank "):
            time.sleep(0.02)
        return self.net(features)


def stormy(strategy: Strategy) -> Chaos:
    job = make_job(
        Slow(),
        epochs=EPOCHS,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        strategy=strategy,
        max_failures=100,
    )
    return Chaos(job, classification(SIZES).shards(), seed=1, faults=10)


def assert_whole_and_clean(chaos: Chaos, outcome: Outcome) -> None:
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * EPOCHS
    assert outcome.history[-1].loss < 0.8 * outcome.history[0].loss
    assert len(chaos.storm.injected) == 10
    assert multiprocessing.active_children() == []


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch, nobody_stays: None) -> None:
    monkeypatch.setattr(membership, "STRAGGLER_S", 1.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_averaging_under_ten_random_faults_ends_with_what_its_commits_give() -> None:
    chaos = stormy(ParameterAveraging(period=2))
    with recorded_commits() as commits:
        outcome = chaos.run()
    assert_whole_and_clean(chaos, outcome)
    assert len(chaos.storm.losses) > 0
    expected = replay(chaos.job, chaos.shards, commits)
    assert relative_difference(outcome.module, expected) < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_reduce_under_ten_random_faults_ends_with_what_a_calm_run_does() -> None:
    chaos = stormy(GradientAllReduce())
    outcome = chaos.run()
    assert_whole_and_clean(chaos, outcome)
    calm = run_world(chaos.job, chaos.shards, ranks_as="processes")
    assert relative_difference(outcome.module, calm.module) < 1e-6


def test_a_window_that_is_left_out_shows() -> None:
    job = make_job(mlp(), epochs=3, strategy=ParameterAveraging(period=2))
    data = classification(SIZES)
    with recorded_commits() as commits:
        outcome = run_world(job, data.shards())
    assert relative_difference(outcome.module, replay(job, data.shards(), commits)) < 1e-12
    commits[7].pop()
    assert relative_difference(outcome.module, replay(job, data.shards(), commits)) > 1e-3
