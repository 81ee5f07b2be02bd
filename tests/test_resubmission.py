"""Workers that need each other are all started again when one is lost, from the last commit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from every_row import every
from interruptions import same_bits
from misbehaving import Misbehaves, explode, kill, passes_in
from torch import Tensor, nn
from toys import Data, classification, make_job

from sparkdl.averager import Averager
from sparkdl.averager.messages.run_events import WorkersRestarted
from sparkdl.callbacks import Callback, Training
from sparkdl.callbacks.base import Calls
from sparkdl.driver import Launch, Outcome, as_builder, run
from sparkdl.errors import CallbackError, ConfigError, DataError, WorkerError, WorkerLostError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import run_world
from sparkdl.testing.world import _processes
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ADAM = partial(torch.optim.Adam, lr=0.01)
SIZES = [42, 22]
"""Of minibatches of 4: 11 and 6 steps an epoch."""


def misbehaving(
    folder: Path,
    strategy: Strategy,
    *,
    deed: Callable[[], None] = kill,
    after: int = 8,
    times: int = 1,
    backward: bool = False,
    **changes: Any,
) -> Job:
    folder.mkdir()
    settings: dict[str, Any] = {"optimizer": ADAM, "epochs": 3, "max_failures": 3, **changes}
    model = Misbehaves(folder, deed, after, times, backward)
    return make_job(model, strategy=strategy, **settings)


@dataclass(frozen=True)
class Pair:
    """A run in which a worker was lost, and one in which none was.

    Attributes:
        outcome: of the one with a loss.
        whole: of the other.
        events: of the one with a loss.
        repeated: how many passes of rank 1 it made more.
    """

    outcome: Outcome
    whole: Outcome
    events: list[object]
    repeated: int


def lost_and_whole(
    folder: Path, strategy: Strategy, *, noisy: bool = False, **changes: Any
) -> Pair:
    """Runs with a loss and without, which come to the same bits and count all rows once."""
    data, events = classification(SIZES), list[object]()
    outcomes = []
    for name, times in (("whole", 0), ("lost", 1)):
        job = misbehaving(folder / name, strategy, **{**changes, "times": times})
        if noisy:
            model = job.model()
            assert isinstance(model, Misbehaves)
            model.net = noise()
            job = replace(job, model=as_builder(model))
        events.clear()
        outcomes.append(run_world(job, data.shards(), ranks_as="processes", on_event=events.append))
    whole, outcome = outcomes
    assert same_bits(outcome, whole)
    repeated = passes_in(folder / "lost") - passes_in(folder / "whole")
    assert repeated > 0
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * job.epochs
    assert_told_once(events, data, job.epochs)
    return Pair(outcome, whole, events, repeated)


DECAY = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)


@pytest.mark.slow_variants(fast=2)
@pytest.mark.parametrize(
    ("strategy", "after", "backward", "repeated", "scheduled"),
    [
        # 6 passes of rank 1 an epoch; what is behind the last commit is done again.
        (GradientAllReduce(bucket_mb=0.0001, commit_every=3), 10, True, 2, "step"),
        (GradientAllReduce(), 10, False, 5, "epoch"),
        (GradientAllReduce(commit_every=1, accumulate=2), 9, False, 2, "step"),
        (ParameterAveraging(2, aggregation="executors", commit_every=3), 11, True, 2, "step"),
        (ParameterAveraging(2, aggregation="executors"), 0, False, 1, "step"),
    ],
    ids=["all-reduce", "epochs", "accumulating", "averaging", "first-step"],
)
def test_a_worker_killed_in_the_middle_costs_the_steps_since_the_last_commit_and_no_bits(
    tmp_path: Path, strategy: Strategy, after: int, backward: bool, repeated: int, scheduled: str
) -> None:
    pair = lost_and_whole(
        tmp_path,
        strategy,
        after=after,
        backward=backward,
        scheduler=DECAY,
        scheduler_every=scheduled,
    )
    assert pair.repeated == repeated
    assert [row.loss for row in pair.outcome.history] == [row.loss for row in pair.whole.history]


class EightBit(torch.optim.SGD):
    """Keeps 2 MiB of whole numbers, which decide how far each step goes."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            codes = state.setdefault("codes", torch.zeros(1 << 19, dtype=torch.uint8))
            codes += 1
            parameter.grad.mul_(codes[-1] / 100)
        super().step(closure)


def test_whole_numbers_of_an_optimizer_come_back_however_many(tmp_path: Path) -> None:
    """As those of 8-bit optimizers; the driver keeps them beside the center's fractions."""
    optimizer = partial(EightBit, lr=0.5)
    strategy = GradientAllReduce(commit_every=3)
    lost_and_whole(tmp_path, strategy, after=10, optimizer=optimizer, epochs=2)


class Noise(nn.Module):
    """Draws from torch, from numpy and from Python."""

    def forward(self, features: Tensor) -> Tensor:
        dropped = nn.functional.dropout(features, 0.5)
        return dropped * np.random.normal(1.0, 0.1) * random.gauss(1.0, 0.1)


def noise() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), Noise(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize(
    ("strategy", "after", "feed"),
    [
        (GradientAllReduce(bucket_mb=0.0001, commit_every=3), 10, FeedOptions()),
        pytest.param(
            ParameterAveraging(2, aggregation="executors"),
            10,
            FeedOptions(),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ParameterAveraging(2), 13, FeedOptions(reshuffle_every=1), marks=pytest.mark.slow
        ),
    ],
    ids=["all-reduce", "averaging", "reshuffled"],
)
def test_random_numbers_go_on_as_if_nobody_had_been_lost(
    tmp_path: Path, strategy: Strategy, after: int, feed: FeedOptions
) -> None:
    lost_and_whole(tmp_path, strategy, after=after, feed=feed, noisy=True)


class Losses(Callback):
    """Keeps what it is told of lost workers, and does something then."""

    def __init__(self, deed: Callable[[Training], None] = lambda training: None) -> None:
        self.told: list[tuple[int | None, str]] = []
        self.deed = deed
        self.error: BaseException | None = None

    def on_worker_lost(self, training: Training, rank: int | None, why: str) -> None:
        self.told.append((rank, why))
        self.deed(training)

    def on_end(self, training: Training, error: BaseException | None) -> None:
        self.error = error


@pytest.mark.slow_variants(fast=1)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (GradientAllReduce(commit_every=3), FeedOptions()),
        (ParameterAveraging(2, aggregation="executors"), FeedOptions()),
        (ParameterAveraging(2, aggregation="hierarchical"), FeedOptions()),
        (ParameterAveraging(2), FeedOptions(reshuffle_every=1)),
    ],
    ids=["all-reduce", "averaging", "hierarchical", "reshuffled"],
)
def test_callbacks_are_told_of_each_loss_after_which_all_start_again(
    tmp_path: Path, strategy: Strategy, options: FeedOptions
) -> None:
    job = misbehaving(tmp_path / "wild", strategy, after=8, times=2, feed=options)
    losses = Losses()
    outcome = run_world(
        job, classification(SIZES).shards(), ranks_as="processes", callbacks=[losses]
    )
    assert len(outcome.history) == 3
    assert [rank for rank, _ in losses.told] == [1, 1]
    assert all("rank 1" in why for _, why in losses.told)
    assert losses.error is None


def test_a_callback_may_end_the_training_where_all_would_start_again(tmp_path: Path) -> None:
    strategy = GradientAllReduce()
    stopping = Losses(lambda training: training.stop("one is too many"))
    job = misbehaving(tmp_path / "wild", strategy, after=8)
    shards = classification(SIZES).shards()
    outcome = run_world(job, shards, ranks_as="processes", callbacks=[stopping])
    assert outcome.stopped == "one is too many"
    assert passes_in(tmp_path / "wild") == 9
    straight = misbehaving(tmp_path / "calm", strategy, times=0, epochs=1)
    assert same_bits(outcome, run_world(straight, shards, ranks_as="processes"))


def test_a_callback_that_fails_where_all_would_start_again_ends_the_fit(tmp_path: Path) -> None:
    failing = Losses(lambda training: explode())
    job = misbehaving(tmp_path / "wild", GradientAllReduce(), after=8)
    with pytest.raises(CallbackError, match="callback Losses failed in on_worker_lost: ZeroDiv"):
        run_world(job, classification(SIZES).shards(), ranks_as="processes", callbacks=[failing])
    assert isinstance(failing.error, CallbackError)
    assert passes_in(tmp_path / "wild") == 9


def test_a_loss_of_nobody_knows_whom_is_told_of_too() -> None:
    losses = Losses()
    calls = Calls([losses], Training(1))
    calls(WorkersRestarted("the Spark job failed"))
    calls(WorkersRestarted("their host is gone", (2, 3)))
    assert losses.told == [
        (None, "the Spark job failed"),
        (2, "their host is gone"),
        (3, "their host is gone"),
    ]


def assert_told_once(events: list[object], data: Data, epochs: int) -> None:
    windows = [event for event in events if isinstance(event, WindowReport)]
    assert sum(window.examples for window in windows) == epochs * sum(data.sizes)
    ended = [event.epoch for event in events if isinstance(event, EpochSummary)]
    assert ended == list(range(1, epochs + 1))
    assert sum(isinstance(event, DataStatistics) for event in events) == 1


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (ParameterAveraging(2), FeedOptions(reshuffle_every=1)),
        (GradientAllReduce(commit_every=3), FeedOptions(reshuffle_every=1)),
        (GradientAllReduce(commit_every=3), FeedOptions(exchange_rows=True)),
        (ParameterAveraging(2), FeedOptions(exchange_rows=True, keep_exchanged=False)),
    ],
    ids=["averaging", "all-reduce", "all-reduce-once", "averaging-once"],
)
def test_rows_that_are_exchanged_are_exchanged_again_and_counted_once(
    tmp_path: Path, strategy: Strategy, options: FeedOptions
) -> None:
    """Without a collective too; workers who gave their rows away cannot be replaced one by one."""
    lost_and_whole(tmp_path, strategy, after=13, feed=options)


@every(
    ("strategy", "settings", "passes", "error", "message"),
    [
        (
            GradientAllReduce(),
            {"times": 99, "max_failures": 2},
            6 + 3 + 1 + 1,
            WorkerLostError,
            r"3 workers were lost, .*maxFailures .*\(2\): .*rank 1",
        ),
        # No commit holds what it would have to start from.
        (GradientAllReduce(shard_optimizer=True), {}, 9, WorkerLostError, "rank 1"),
        (
            GradientAllReduce(),
            {"deed": explode},
            9,
            WorkerError,
            r"rank 1, epoch 2, step 14: .*the user's own mistake",
        ),
    ],
)
def test_one_loss_too_many_or_the_users_error_ends_the_run(
    tmp_path: Path,
    strategy: Strategy,
    settings: dict[str, Any],
    passes: int,
    error: type[Exception],
    message: str,
) -> None:
    job = misbehaving(tmp_path / "lost", strategy, **settings)
    with pytest.raises(error, match=message):
        run_world(job, classification(SIZES).shards(), ranks_as="processes")
    assert passes_in(tmp_path / "lost") == passes


def another_way_the_second_time(first: Launch, second: Launch) -> Launch:
    launches = [first, second]

    @contextmanager
    def launch(averager: Averager) -> Any:
        with launches.pop(0)(averager):
            yield

    return launch


def test_other_rows_than_before_are_refused(tmp_path: Path) -> None:
    job = misbehaving(tmp_path / "wild", GradientAllReduce(), after=3)
    launch = another_way_the_second_time(
        _processes(job, classification([12, 8]).shards(), tmp_path),
        _processes(job, classification([12, 9]).shards(), tmp_path),
    )
    with pytest.raises(DataError, match=r"read different rows \(21 rows now, 20 then") as caught:
        run(job, 2, launch)
    assert "all workers were restarted: rank 1" in caught.value.__notes__[0]


def test_workers_that_cannot_start_again_say_why_they_had_to(tmp_path: Path) -> None:
    def refuse(averager: Averager) -> Any:
        raise ConfigError("2 workers need a gang-scheduled start, but there is 1 slot")

    job = misbehaving(tmp_path / "wild", GradientAllReduce(), after=3)
    launch = another_way_the_second_time(
        _processes(job, classification([12, 8]).shards(), tmp_path), refuse
    )
    with pytest.raises(WorkerLostError, match=r"rank 1 .*could not be restarted: .* 1 slot"):
        run(job, 2, launch)
