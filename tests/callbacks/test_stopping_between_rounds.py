"""Who exchanges among themselves has no round but at an epoch's end, and yet stops before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import classification, make_job, mlp
from virtual_time import coordinator_of
from waiting import eventually

from sparkdl.averager import Averager
from sparkdl.callbacks import Callback, TimeBudget, Training
from sparkdl.driver import as_builder
from sparkdl.events import WindowReport
from sparkdl.strategies import (
    ElasticAveraging,
    GradientAllReduce,
    ParameterAveraging,
    Strategy,
    ThresholdGradientSharing,
)
from sparkdl.testing import run_world

SIZES = [20_000, 16_000]
"""Of minibatches of 4; at a fiftieth of a second each, an epoch takes a minute and a half."""
WAIT_S = 60.0
"""The longest that a test waits for anything."""


class Unhurried(nn.Module):
    """Takes its time for each minibatch, or waits behind some of them for a file."""

    def __init__(self, seconds: float, behind: int | None = None, path: Path | None = None) -> None:
        super().__init__()
        self.net = mlp()
        self.seconds = seconds
        self.behind, self.path = behind, path
        self.seen = 0

    def forward(self, features: Tensor) -> Tensor:
        if self.path is not None and self.seen == self.behind:
            until = time.monotonic() + WAIT_S
            while not self.path.exists() and time.monotonic() < until:
                time.sleep(0.01)
        time.sleep(self.seconds)
        self.seen += 1
        return self.net(features)


class Counts(Callback):
    """Counts what was committed, and may stop behind a step."""

    def __init__(self, last: float = float("inf")) -> None:
        self.last = last
        self.rows, self.steps, self.rounds = 0, 0, 0

    def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
        self.rows += sum(report.examples for report in reports)
        self.steps = training.step
        self.rounds += 1
        if training.step >= self.last:
            training.stop("that many steps are enough")


def stopped(self: Averager, reason: str, *, stop: Any = Averager.stop, path: Path) -> None:
    """Stop a run, and write a file once it has been stopped."""
    stop(self, reason)
    assert eventually(lambda: coordinator_of(self).stopped is not None)
    path.touch()


class StopsAtOnce(Callback):
    """Wants to stop as soon as it is asked between two rounds."""

    def on_tick(self, training: Training) -> None:
        training.stop("somebody has pressed the button")


def job_of(strategy: Strategy[Any], module: nn.Module) -> Any:
    return make_job(module, strategy=strategy, deadline_s=60.0)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("strategy", "often"),
    [
        (GradientAllReduce(), GradientAllReduce(commit_every=1)),
        (
            ParameterAveraging(5, aggregation="executors"),
            ParameterAveraging(5, aggregation="executors", commit_every=5),
        ),
        (
            ThresholdGradientSharing(period=4, aggregation="executors"),
            ThresholdGradientSharing(period=4, aggregation="executors", commit_every=4),
        ),
        (ElasticAveraging(4, aggregation="executors"), None),
    ],
    ids=["all-reduce", "averaging", "sharing", "elastic"],
)
def test_a_time_budget_ends_an_epoch_in_its_middle_with_all_that_was_trained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: Strategy[Any],
    often: Strategy[Any] | None,
) -> None:
    shards = classification(SIZES).shards(rows_a_batch=5000)
    counts = Counts()
    outcome = run_world(
        job_of(strategy, Unhurried(0.02)),
        shards,
        ranks_as="processes",
        callbacks=[TimeBudget(0.1), counts],
    )
    assert outcome.stopped == "its time budget of 0.1 s is used up"
    assert outcome.history == []
    assert counts.rounds == 1
    assert counts.rows == 2 * 4 * counts.steps
    assert 0 < counts.steps < 2500
    start = mlp().state_dict()
    ended = outcome.module.net.state_dict()
    assert not torch.equal(ended["0.weight"], start["0.weight"])
    if often is not None:
        # The same steps once more, whose last one is known from the start.
        path = tmp_path / "stopped"
        monkeypatch.setattr(Averager, "stop", partialmethod(stopped, path=path))
        again = run_world(
            job_of(often, Unhurried(0.0, counts.steps, path)),
            shards,
            ranks_as="processes",
            callbacks=[Counts(counts.steps)],
        )
        assert all(map(torch.equal, again.module.parameters(), outcome.module.parameters()))


def test_a_stop_between_two_rounds_waits_for_the_next_one() -> None:
    job = replace(
        make_job(mlp(), strategy=ParameterAveraging(25)), model=as_builder(Unhurried(0.02))
    )
    counts = Counts()
    shards = classification([2000, 2000]).shards(rows_a_batch=500)
    outcome = run_world(job, shards, callbacks=[counts, StopsAtOnce()])
    assert outcome.stopped == "somebody has pressed the button"
    assert outcome.history == []
    assert counts.rounds >= 1
    assert counts.rows == 2 * 4 * counts.steps == 200 * counts.rounds
