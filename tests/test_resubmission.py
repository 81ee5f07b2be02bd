"""Workers that need each other are all started again when one is lost, from the last commit.

``strategies/contract/test_recovery.py`` has what they train then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from every_row import every
from interruptions import same_bits
from misbehaving import Misbehaves, explode, kill, passes_in
from toys import classification, make_job
from waiting import WAIT_S

from sparkdl.averager import Averager
from sparkdl.averager.run_events import WorkersRestarted
from sparkdl.callbacks import Callback, Training
from sparkdl.callbacks.base import Calls
from sparkdl.driver import Launch, run
from sparkdl.errors import CallbackError, ConfigError, DataError, WorkerError, WorkerLostError
from sparkdl.feed.feed import FeedOptions
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import _processes, run_world
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


@pytest.mark.nightly_variants(daily=1)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (GradientAllReduce(commit_every=3), FeedOptions()),
        (ParameterAveraging(2, aggregation="hierarchical"), FeedOptions()),
        (ParameterAveraging(2), FeedOptions(reshuffle_every=1)),
    ],
    ids=["all-reduce", "hierarchical", "reshuffled"],
)
def test_callbacks_are_told_of_each_loss_after_which_all_start_again(
    tmp_path: Path, strategy: Strategy, options: FeedOptions
) -> None:
    job = misbehaving(tmp_path / "wild", strategy, after=8, times=2, feed=options)
    losses, shards = Losses(), classification(SIZES).shards()
    outcome = run_world(job, shards, ranks_as="processes", callbacks=[losses])
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
    gone = "their host is gone"
    assert losses.told == [(None, "the Spark job failed"), (2, gone), (3, gone)]


@every(
    ("sharded", "settings", "passes", "error", "message"),
    [
        (
            *(False, {"times": 99, "max_failures": 2}, 6 + 3 + 1 + 1),
            *(WorkerLostError, r"3 workers were lost, .*maxFailures .*\(2\): .*rank 1"),
        ),
        # No commit holds what it would have to start from.
        (True, {}, 9, WorkerLostError, "rank 1"),
        (False, {"deed": explode}, 9, WorkerError, r"epoch 2, step 14: .*the user's own mistake"),
    ],
)
def test_one_loss_too_many_or_the_users_error_ends_the_run(
    tmp_path: Path, sharded: bool, settings: Any, passes: int, error: Any, message: str
) -> None:
    job = misbehaving(tmp_path / "lost", GradientAllReduce(shard_optimizer=sharded), **settings)
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
    first = _processes(job, classification([12, 8]).shards(), tmp_path)
    launch = another_way_the_second_time(first, refuse)
    with pytest.raises(WorkerLostError, match=r"rank 1 .*could not be restarted: .* 1 slot"):
        run(job, 2, launch)


def test_a_worker_that_ends_before_it_joins_is_told_of_after_a_restart_too(tmp_path: Path) -> None:
    told: list[Exception] = []
    averager: Any = SimpleNamespace(address=None, fail=told.append)
    nobody_s: Any = SimpleNamespace(survivable_losses=0, deadline_s=WAIT_S)
    launch = _processes(nobody_s, [[]], tmp_path)
    with pytest.raises(WorkerLostError), launch(averager):
        raise WorkerLostError("rank 0 was lost")
    told.clear()
    with launch(averager):
        pass
    assert str(told[-1]) == "rank 0 exited with code 1"
