"""Asynchronous SGD: the center is what the commits give, whoever is waited for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import pytest
import trainings
from decided import do
from every_row import every
from misbehaving import die_after
from replayed import ByHand, recorded_decisions
from toys import relative_error
from trainings import DATA, SIZES

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.strategies import ASP, BSP, PSSP, SSP, AsynchronousSGD, Softsync
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(misbehaving)

STRATEGY = AsynchronousSGD(period=2, rate=0.8)


job = partial(trainings.job, strategy=STRATEGY)


def by_hand(strategy: AsynchronousSGD) -> ByHand:
    return ByHand(DATA, strategy.rate, scale_by_staleness=strategy.scale_by_staleness)


@every("scale_by_staleness", [True, False])
@every("barrier", [ASP(), SSP(1), PSSP(1, 1), Softsync(2)])
def test_the_center_is_what_the_decisions_say(barrier: Any, scale_by_staleness: bool) -> None:
    strategy = replace(STRATEGY, barrier=barrier, scale_by_staleness=scale_by_staleness)
    with recorded_decisions() as decisions:
        outcome = run_world(job(strategy=strategy), DATA.shards())
    assert relative_error(outcome.module, by_hand(strategy).follow(decisions)) < 1e-9
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3


def test_with_everyone_in_each_update_nothing_is_stale() -> None:
    outcome = run_world(job(strategy=AsynchronousSGD(period=2, barrier=BSP())), DATA.shards())
    assert [(row.mean_staleness, row.max_staleness) for row in outcome.history] == [(0.0, 0)] * 3


def test_a_resumed_history_has_the_staleness_of_windows_before(tmp_path: Path) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    with recorded_decisions() as decisions:
        die_after(14, job(), DATA.shards(), policy)
        outcome = run_world(job(), DATA.shards(), checkpoints=policy)
    reports = [each.event for each in decisions if isinstance(each, do.report)]
    # What was committed behind the checkpoint is trained again: the last report counts.
    windows = {(w.rank, w.step): w for w in reports if isinstance(w, WindowReport) and w.examples}
    for row in outcome.history:
        told = [w.staleness for w in windows.values() if w.epoch == row.epoch]
        assert row.mean_staleness == pytest.approx(sum(told) / len(told), rel=1e-12)
        assert row.max_staleness == max(told) > 0
    first = next(each for each in reports if isinstance(each, EpochSummary))
    assert first == outcome.history[0]
