"""Every strategy where a training is cut short, or loses a worker: by the rows of the table."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
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
import springs
import strategy_row
import strategy_table
from interruptions import same_bits
from misbehaving import Misbehaves, kill, kill_once, resume_after
from recorded import recorded_decisions
from strategy_row import Row
from strategy_table import ROWS
from support.replay import recorded_commits
from torch import Tensor, nn
from toys import classification, mlp, relative_error

from sparkdl.driver import Outcome
from sparkdl.testing import run_world

for module in (
    misbehaving,
    own_asynchronous,
    own_drifting,
    own_outer_momentum,
    springs,
    driver_rows,
    peer_rows,
    strategy_row,
    strategy_table,
    sys.modules[__name__],
):
    cloudpickle.register_pickle_by_value(module)


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
    slow = pytest.mark.slow
    marked = [
        pytest.param(row, id=row.name, marks=[slow] if fact in row.slow else [])
        for row in ROWS
        if getattr(row, fact) not in (None, (), False)
    ]
    return pytest.mark.parametrize("row", marked)


def resumed(row: Row, windows: int, folder: Path) -> Outcome:
    shards = row.data.shards()
    return resume_after(windows, row.job(), shards, folder, row.ranks_as, row.every_rounds)


def require_same_bits(row: Row, windows: Sequence[int], folder: Path) -> None:
    whole = run_world(row.job(), row.data.shards(), ranks_as=row.ranks_as)
    others = []
    for each in windows:
        found = resumed(row, each, folder)
        if not (same_bits(found, whole) and measured(found) == measured(whole)):
            others.append(each)
    assert not others, f"resumed after {others} of {windows} commits it is another"


def measured(outcome: Outcome) -> list[Any]:
    return [row.measured for row in outcome.history]


@rows_with("resumed")
def test_resumed_it_ends_in_the_same_bits(row: Row, tmp_path: Path) -> None:
    require_same_bits(row, row.resumed, tmp_path)


@rows_with("alone")
def test_alone_and_resumed_it_ends_in_the_same_bits(row: Row, tmp_path: Path) -> None:
    alone = replace(row, data=classification([42]), ranks_as="threads")
    require_same_bits(alone, row.alone, tmp_path)


@rows_with("goes_on")
def test_resumed_it_goes_on_where_each_worker_was(row: Row, tmp_path: Path) -> None:
    for windows in row.goes_on:
        outcome = resumed(row, windows, tmp_path)
        assert outcome.history[-1].loss < outcome.history[0].loss, windows


@rows_with("killed")
def test_a_killed_worker_comes_back_to_the_center_that_the_commits_give(
    row: Row, tmp_path: Path
) -> None:
    assert row.killed is not None
    plain = replace(row, settings={})
    with recorded_decisions() as decisions, recorded_commits() as commits:
        outcome = kill_once(
            plain.job(Misbehaves(tmp_path, kill, row.killed_after)), row.data.shards()
        )
    oracle = row.killed.oracle(decisions, commits)
    assert relative_error(outcome.module.get_submodule("net"), oracle) < row.killed.within


@rows_with("killed_learns")
def test_a_killed_worker_is_done_without_until_it_comes_back(row: Row, tmp_path: Path) -> None:
    plain = replace(row, settings={})
    outcome = kill_once(plain.job(Misbehaves(tmp_path, kill, row.killed_after)), row.data.shards())
    assert outcome.history[-1].loss < outcome.history[0].loss


@rows_with("restarted")
def test_when_all_start_again_it_ends_in_the_same_bits(row: Row, tmp_path: Path) -> None:
    again = {**row.starts_all_again(), **(row.restarted or {})}
    whole = run_world(row.job(mlp(), **again), row.data.shards(), ranks_as="processes")
    outcome = kill_once(
        row.job(Misbehaves(tmp_path, kill, row.killed_after), **again), row.data.shards()
    )
    assert same_bits(outcome, whole)
    assert measured(outcome) == measured(whole)
    if row.strategy.needs.collective:
        assert [each.loss for each in outcome.history] == [each.loss for each in whole.history]


@rows_with("restarted_learns")
def test_when_all_start_again_no_row_is_lost(row: Row, tmp_path: Path) -> None:
    killed = row.job(Misbehaves(tmp_path, kill, row.killed_after), **row.starts_all_again())
    outcome = kill_once(killed, row.data.shards())
    assert outcome.history[-1].loss < outcome.history[0].loss


@rows_with("twice")
def test_two_runs_end_in_the_same_bits(row: Row) -> None:
    first, second = (
        run_world(row.job(Overtaking(row.model)), row.data.shards(), ranks_as=row.ranks_as)
        for _ in range(2)
    )
    assert same_bits(first, second)
    assert [each.loss for each in first.history] == [each.loss for each in second.history]
