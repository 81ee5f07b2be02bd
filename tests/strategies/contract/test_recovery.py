"""Every strategy where a training is cut short, or loses a worker: by the rows of the table."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import driver_rows
import misbehaving
import own_asynchronous
import own_drifting
import own_outer_momentum
import peer_rows
import pytest
import strategy_row
from by_hand import MeanChange, recorded_decisions
from decided import Told, do
from interruptions import die_after, same_bits, save_and_stop
from misbehaving import Misbehaves, kill, kill_once, passes_in, resume_after
from strategy_row import Row, followed, with_momentum
from support.replay import recorded_commits
from torch import Tensor, nn
from toys import classification, mlp, relative_error
from trainings import DATA

from sparkdl.driver import Outcome
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.testing import run_world

for module in (
    misbehaving,
    own_asynchronous,
    own_drifting,
    own_outer_momentum,
    driver_rows,
    peer_rows,
    strategy_row,
    sys.modules[__name__],
):
    cloudpickle.register_pickle_by_value(module)

OWN_MOMENTUM = own_outer_momentum.OuterMomentum(period=2, momentum=0.6, rate=0.7)
OWN_ASYNCHRONOUS = own_asynchronous.EachForItself(period=2, rate=0.8)
ROWS = [
    *driver_rows.ROWS,
    *peer_rows.ROWS,
    Row(
        "outer momentum of one's own",
        OWN_MOMENTUM,
        resumed=(14,),
        killed=with_momentum(OWN_MOMENTUM),
    ),
    Row(
        "asynchronous of one's own",
        OWN_ASYNCHRONOUS,
        alone=(7,),
        killed=followed(lambda: MeanChange(DATA, 0.8, scale_by_staleness=True)),
        nightly=("killed",),
    ),
    Row(
        "state of one's own",
        own_drifting.Drifting(),
        data=classification([22, 14, 5]),
        resumed=(3, 12, 20),
        restarted={},
        killed_after=6,
    ),
]
"""One a strategy: its settings, and what comes of it where a training is cut short."""


class Overtaking(nn.Module):
    """Ranks overtake each other: every pass takes another time."""

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = model()

    def forward(self, features: Tensor) -> Tensor:
        time.sleep(random.SystemRandom().choice([0, 0, 0.002, 0.006]))
        outputs: Tensor = self.net(features)
        return outputs


def rows_with(fact: str) -> Any:
    """Rows that have it; where it is several places of a training, all but the first at night."""
    marked = []
    for row in ROWS:
        found = getattr(row, fact)
        several = isinstance(found, tuple) and len(found) > 1
        night = [pytest.mark.nightly] if fact in row.nightly else []
        if found not in (None, (), False):
            daily = replace(row, **{fact: found[:1]}) if several else row
            marked.append(pytest.param(daily, id=row.name, marks=night))
        if several:
            later = replace(row, **{fact: found[1:]})
            marked.append(pytest.param(later, id=f"{row.name}, later", marks=pytest.mark.nightly))
    return pytest.mark.parametrize("row", marked)


def resumed(row: Row, windows: int, folder: Path, stop: Any = die_after) -> Outcome:
    job = row.job()
    return resume_after(windows, job, row.data, folder, row.ranks_as, row.every_rounds, stop)


def require_same_bits(row: Row, folder: Path) -> None:
    whole = run_world(row.job(), row.data.shards(), ranks_as=row.ranks_as)
    others = []
    cuts = [(die_after, each) for each in row.resumed]
    for stop, windows in cuts + [(save_and_stop, each) for each in row.stopped]:
        found = resumed(row, windows, folder / stop.__name__, stop)
        if not (same_bits(found, whole) and same_history(found, whole)):
            others.append((stop.__name__, windows))
    assert not others, f"resumed after {others} of {cuts} commits it is another"


def same_history(first: Outcome, second: Outcome) -> bool:
    """Losses to their precision: gloo adds up three ranks' in an order of its own."""
    return all(
        mine.measured == other.measured and mine.loss == pytest.approx(other.loss, rel=1e-12)
        for mine, other in zip(first.history, second.history, strict=True)
    )


def committed(decisions: list[Told]) -> list[WindowReport]:
    """The windows that the driver was told of, which are what has moved the center, each once."""
    events = [each.event for each in decisions if isinstance(each, do.report)]
    windows = [each for each in events if isinstance(each, WindowReport)]
    commits = [each.contributions for each in decisions if isinstance(each, do.commit)]
    weights = Counter(weight for each in commits for weight in each.weights)
    assert weights == Counter(each.weight for each in windows if each.weight)
    return windows


def require_rows_once(row: Row, epochs: int, windows: Iterable[WindowReport]) -> None:
    """Each rank's rows, in each epoch."""
    rows = Counter[tuple[int, int]]()
    for window in windows:
        rows[window.rank, window.epoch] += window.examples
    sizes = enumerate(row.data.sizes)
    assert rows == {(rank, 1 + e): size for rank, size in sizes for e in range(epochs)}


def misbehaving_job(row: Row, folder: Path, net: Any = mlp, **changes: Any) -> Any:
    model = Misbehaves(folder, kill, row.killed_after, backward=row.backward, net=net())
    return row.job(model, **changes)


@rows_with("resumed")
def test_resumed_it_ends_in_the_same_bits(row: Row, tmp_path: Path) -> None:
    require_same_bits(row, tmp_path)


@rows_with("alone")
def test_alone_and_resumed_it_ends_in_the_same_bits(row: Row, tmp_path: Path) -> None:
    one = classification([42])
    alone = replace(row, data=one, ranks_as="threads", resumed=row.alone, stopped=())
    require_same_bits(alone, tmp_path)


@rows_with("goes_on")
def test_resumed_it_goes_on_where_each_worker_was(row: Row, tmp_path: Path) -> None:
    for cut in row.goes_on:
        with recorded_decisions() as decisions:
            outcome = resumed(row, cut, tmp_path)
        # Windows behind the checkpoint are trained again: the last report of each counts.
        windows = {(each.rank, each.step): each for each in committed(decisions) if each.examples}
        require_rows_once(row, len(outcome.history), windows.values())


@rows_with("killed")
def test_a_killed_worker_comes_back_to_the_center_that_the_commits_give(
    row: Row, tmp_path: Path
) -> None:
    assert row.killed is not None
    plain = replace(row, settings={})
    with recorded_decisions() as decisions, recorded_commits() as commits:
        outcome = kill_once(misbehaving_job(plain, tmp_path), row.data.shards())
    oracle = row.killed.oracle(decisions, commits)
    assert relative_error(outcome.module.get_submodule("net"), oracle) < row.killed.within


@rows_with("killed_counts")
def test_a_killed_worker_is_done_without_until_it_comes_back(row: Row, tmp_path: Path) -> None:
    plain = replace(row, settings={})
    with recorded_decisions() as decisions:
        outcome = kill_once(misbehaving_job(plain, tmp_path), row.data.shards())
    require_rows_once(row, len(outcome.history), committed(decisions))


@rows_with("restarted")
def test_when_all_start_again_it_ends_in_the_same_bits(row: Row, tmp_path: Path) -> None:
    """Behind the last commit, since when all is done once more, but is told once."""
    again = {**row.starts_all_again(), **(row.restarted or {})}
    whole = run_world(row.job(row.net(), **again), row.data.shards(), ranks_as="processes")
    events: list[object] = []
    job = misbehaving_job(row, tmp_path, row.net, **again)
    outcome = kill_once(job, row.data.shards(), on_event=events.append)
    assert same_bits(outcome, whole)
    assert [each.measured for each in outcome.history] == [each.measured for each in whole.history]
    if row.strategy.needs.collective:
        assert [each.loss for each in outcome.history] == [each.loss for each in whole.history]
    if row.repeats is not None:
        passes = job.epochs * -(-row.data.sizes[1] // job.batch_size)
        assert passes_in(tmp_path) == passes + row.repeats
    windows = [event.examples for event in events if isinstance(event, WindowReport)]
    assert sum(windows) == job.epochs * sum(row.data.sizes)
    ended = [event.epoch for event in events if isinstance(event, EpochSummary)]
    assert ended == list(range(1, job.epochs + 1))
    assert sum(isinstance(event, DataStatistics) for event in events) == 1


@rows_with("restarted_counts")
def test_when_all_start_again_no_row_is_lost(row: Row, tmp_path: Path) -> None:
    job = misbehaving_job(row, tmp_path, **row.starts_all_again())
    with recorded_decisions() as decisions:
        kill_once(job, row.data.shards())
    windows = [(each.rank, each.step) for each in committed(decisions) if each.examples]
    assert len(windows) == len(set(windows))


@rows_with("twice")
def test_two_runs_end_in_the_same_bits(row: Row) -> None:
    first, second = (
        run_world(row.job(Overtaking(row.model)), row.data.shards(), ranks_as=row.ranks_as)
        for _ in range(2)
    )
    assert same_bits(first, second)
    assert [each.loss for each in first.history] == [each.loss for each in second.history]
