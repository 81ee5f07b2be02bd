"""Callbacks that only watch, and what stops a fit between rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import classification, make_job, mlp
from virtual_time import coordinator_of
from waiting import eventually

from sparkdl.averager import Averager
from sparkdl.averager.run_events import CheckpointSaved
from sparkdl.callbacks import (
    Callback,
    MLflow,
    TensorBoard,
    TimeBudget,
    Training,
    TrainingReport,
)
from sparkdl.callbacks.base import QUICK_S, Calls
from sparkdl.driver import Outcome
from sparkdl.errors import CallbackError
from sparkdl.events import WindowReport
from sparkdl.strategies import (
    ElasticAveraging,
    GradientAllReduce,
    ParameterAveraging,
    Strategy,
    ThresholdGradientSharing,
)
from sparkdl.testing import run_world


def fail(*_arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [each for each in caplog.records if each.name == "sparkdl.callbacks.base"]
    return [each.getMessage() for each in records if each.levelno == logging.WARNING]


def trained(callbacks: Sequence[Callback], epochs: int = 3) -> Outcome:
    job = make_job(mlp(), epochs=epochs)
    return run_world(job, classification([16, 16]).shards(), callbacks=callbacks)


def test_whatever_fails_in_an_observer_the_model_is_the_one_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert all(each.observer for each in (MLflow, TensorBoard, TrainingReport))
    hooks = dict.fromkeys(["on_round", "on_epoch", "on_end"], fail)
    watched = trained([type("Watcher", (Callback,), {"observer": True, **hooks})()])
    alone = trained([])
    assert len(watched.history) == 3
    assert all(map(torch.equal, watched.module.parameters(), alone.module.parameters()))
    first, last = warnings_in(caplog)
    assert "Watcher failed in on_round" in first
    assert "Watcher failed in on_end" in last
    assert "No space left on device" in first


def test_an_observer_that_fails_at_the_start_ends_the_fit() -> None:
    watcher = type("Watcher", (Callback,), {"observer": True, "on_start": fail})()
    with pytest.raises(CallbackError, match="Watcher failed in on_start"):
        trained([watcher])


def test_an_observer_is_tried_again_unless_that_took_long_and_always_at_the_end() -> None:
    now, calls = [0.0], list[str]()

    class Watcher(Callback):
        observer = True

        def __init__(self, name: str, seconds: float) -> None:
            self.name, self.seconds = name, seconds

        def on_checkpoint(self, training: Training) -> None:
            calls.append(self.name)
            now[0] += self.seconds
            fail()

        def on_end(self, training: Training, error: BaseException | None) -> None:
            calls.append(f"{self.name} ends")

    watchers = [Watcher("quick", QUICK_S / 2), Watcher("slow", 2 * QUICK_S)]
    told = Calls(watchers, Training(1), clock=lambda: now[0])
    for _ in range(3):
        told(CheckpointSaved())
    told.end(None)
    assert calls == ["quick", "slow", "quick", "quick", "quick ends", "slow ends"]


def test_what_a_callback_does_at_the_end_does_not_cost_the_model() -> None:
    broken = type("Broken", (Callback,), {"on_end": fail})()
    with pytest.raises(CallbackError, match="Broken failed in on_end") as caught:
        trained([broken])
    outcome, alone = caught.value.model, trained([])
    assert all(map(torch.equal, outcome.module.parameters(), alone.module.parameters()))
    assert len(outcome.history) == 3


class Untellable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


def test_an_observer_whose_error_has_no_text_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def untellable(*_arguments: Any) -> None:
        raise Untellable

    hooks = dict.fromkeys(["on_checkpoint", "on_end"], untellable)
    told = Calls([type("Watcher", (Callback,), {"observer": True, **hooks})()], Training(1))
    told(CheckpointSaved())
    told.end(None)
    assert all("Untellable: <exception str() failed>" in each for each in warnings_in(caplog))
    assert len(warnings_in(caplog)) == 2


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
        (GradientAllReduce(), 1),
        (ParameterAveraging(5, aggregation="executors"), 5),
        (ThresholdGradientSharing(period=4, aggregation="executors"), 4),
        (ElasticAveraging(4, aggregation="executors"), None),
    ],
    ids=["all-reduce", "averaging", "sharing", "elastic"],
)
def test_a_time_budget_ends_an_epoch_in_its_middle_with_all_that_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any, often: int | None
) -> None:
    shards = classification(SIZES).shards(rows_a_batch=5000)
    run, counts = partial(run_world, shards=shards, ranks_as="processes"), Counts()
    outcome = run(job_of(strategy, Unhurried(0.02)), callbacks=[TimeBudget(0.1), counts])
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
        slow = job_of(replace(strategy, commit_every=often), Unhurried(0.0, counts.steps, path))
        again = run(slow, callbacks=[Counts(counts.steps)])
        assert all(map(torch.equal, again.module.parameters(), outcome.module.parameters()))


def test_a_stop_between_two_rounds_waits_for_the_next_one() -> None:
    job, counts = job_of(ParameterAveraging(25), Unhurried(0.02)), Counts()
    shards = classification([2000, 2000]).shards(rows_a_batch=500)
    outcome = run_world(job, shards, callbacks=[counts, StopsAtOnce()])
    assert outcome.stopped == "somebody has pressed the button"
    assert outcome.history == []
    assert counts.rounds >= 1
    assert counts.rows == 2 * 4 * counts.steps == 200 * counts.rounds
