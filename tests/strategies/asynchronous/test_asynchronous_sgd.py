"""Asynchronous SGD: the center is what the commits give, whoever is waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import pytest
import torch
from every_row import every
from interruptions import same_bits
from misbehaving import die_after
from recorded import recorded_decisions
from replayed import ByHand
from torch import nn
from toys import (
    classification,
    make_job,
    mlp,
    relative_error,
    sgd_on_union,
)

from sparkdl.averager.coordination import decisions as do
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.strategies import (
    ASP,
    BSP,
    PBSP,
    PSSP,
    SSP,
    AsynchronousSGD,
    ParameterAveraging,
    Softsync,
)
from sparkdl.testing import run_world
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(misbehaving)

SIZES = [40, 33, 21]
DATA = classification(SIZES)
EQUAL = classification([24, 24, 24])
STRATEGY = AsynchronousSGD(period=2, rate=0.8)
AVERAGING = ParameterAveraging(period=2, average_optimizer_state=False)


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    settings = {"strategy": STRATEGY, "epochs": 3, "max_failures": 1, **changes}
    return make_job(model or mlp(), **settings)


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
    assert outcome.history[-1].loss < outcome.history[0].loss


def test_alone_it_is_sgd() -> None:
    data = classification([41])
    outcome = run_world(job(strategy=AsynchronousSGD(period=2)), data.shards())
    oracle = sgd_on_union(mlp(), data, lr=0.1, epochs=3, batch_size=4, dtype=torch.float64)
    assert relative_error(outcome.module, oracle) < 1e-9


def test_with_everyone_in_each_update_it_is_parameter_averaging() -> None:
    bsp = job(strategy=AsynchronousSGD(period=2, barrier=BSP()))
    outcome, average = (
        run_world(bsp, DATA.shards()),
        run_world(job(strategy=AVERAGING), DATA.shards()),
    )
    assert relative_error(outcome.module, average.module) < 1e-12
    assert same_bits(outcome, run_world(bsp, DATA.shards()))
    assert [(row.mean_staleness, row.max_staleness) for row in outcome.history] == [(0.0, 0)] * 3


@every("barrier", [SSP(0), PBSP(2)])
def test_where_everyone_waits_for_everyone_the_changes_of_equal_workers_add_up_to_their_mean(
    barrier: Any,
) -> None:
    strategy = AsynchronousSGD(2, barrier=barrier)
    outcome = run_world(job(strategy=strategy), EQUAL.shards())
    average = run_world(job(strategy=AVERAGING), EQUAL.shards())
    assert relative_error(outcome.module, average.module) < 1e-12


def test_a_resumed_history_has_the_staleness_of_windows_before(tmp_path: Path) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    with recorded_decisions() as decisions:
        die_after(14, job(), DATA.shards(), policy)
        outcome = run_world(job(), DATA.shards(), checkpoints=policy)
    reports = [each.event for each in decisions if isinstance(each, do.Report)]
    # What was committed behind the checkpoint is trained again: the last report counts.
    windows = {(w.rank, w.step): w for w in reports if isinstance(w, WindowReport) and w.examples}
    for row in outcome.history:
        told = [w.staleness for w in windows.values() if w.epoch == row.epoch]
        assert row.mean_staleness == pytest.approx(sum(told) / len(told), rel=1e-12)
        assert row.max_staleness == max(told) > 0
    first = next(each for each in reports if isinstance(each, EpochSummary))
    assert first == outcome.history[0]
