"""Workers that are not waited for: the center is what the commits give; delayed momentum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import pytest
import torch
from by_hand import Delayed, MeanChange, Replay, Springs, recorded_decisions
from by_keyword import center_of
from decided import do
from every_row import every_row
from hypothesis import given, settings
from hypothesis import strategies as st
from misbehaving import die_after
from toys import relative_error
from trainings import DATA, job

from sparkdl.averager.values.center_update import new_memory
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.protocols import Segment
from sparkdl.strategies import (
    ASP,
    BSP,
    CHANGES,
    PSSP,
    SSP,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    Contributions,
    DelayedNesterov,
    ElasticAveraging,
    ParameterAveraging,
    Softsync,
)
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(misbehaving)

STRATEGY = AsynchronousSGD(period=2, rate=0.8)
DELAYED = AsynchronousOuterOptimizer(DelayedNesterov(3, 0.7, 0.5), period=2)
SPRINGS = ElasticAveraging(period=2, moving_rate=0.2)


@every_row(
    *(
        (
            replace(STRATEGY, barrier=barrier, scale_by_staleness=scaled),
            MeanChange(DATA, 0.8, scale_by_staleness=scaled),
        )
        for barrier, scaled in (
            *((ASP(), True), (SSP(1), False)),
            *((PSSP(1, 1), True), (Softsync(2), False)),
        )
    ),
    (DELAYED, Delayed(DATA, 3, 0.7, 0.5)),
    # The third of three is left out of the first round.
    (ParameterAveraging(2, average_optimizer_state=False, cutoff=1), MeanChange(DATA)),
    # Zhang et al.'s algorithms 1 and 2, of workers that come one by one.
    *(
        (
            replace(SPRINGS, mode=mode, momentum=momentum),
            Springs(0.2, momentum, looks_ahead=bool(momentum), reads=mode == "hogwild"),
        )
        for mode, momentum in (("asynchronous", 0.8), ("hogwild", 0.8), ("round_robin", 0.0))
    ),
)
def test_the_center_is_what_the_decisions_say(strategy: Any, by_hand: Replay) -> None:
    with recorded_decisions() as decisions:
        outcome = run_world(job(strategy=strategy), by_hand.data.shards())
    within = 1e-11 if isinstance(by_hand, Springs) else 1e-9
    assert relative_error(outcome.module, by_hand.follow(decisions)) < within
    assert [row.examples for row in outcome.history] == [sum(by_hand.data.sizes)] * 3
    in_turn = getattr(strategy, "mode", None) == "round_robin"
    assert in_turn or max(row.max_staleness for row in outcome.history) > 0


def test_with_everyone_in_each_update_nothing_is_stale() -> None:
    outcome = run_world(job(strategy=AsynchronousSGD(period=2, barrier=BSP())), DATA.shards())
    assert [(row.mean_staleness, row.max_staleness) for row in outcome.history] == [(0.0, 0)] * 3


def test_a_resumed_history_has_the_staleness_of_windows_before(tmp_path: Path) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    with recorded_decisions() as decisions:
        die_after(14, job(strategy=STRATEGY), DATA.shards(), policy)
        outcome = run_world(job(strategy=STRATEGY), DATA.shards(), checkpoints=policy)
    reports = [each.event for each in decisions if isinstance(each, do.report)]
    # What was committed behind the checkpoint is trained again: the last report counts.
    windows = {(w.rank, w.step): w for w in reports if isinstance(w, WindowReport) and w.examples}
    for row in outcome.history:
        told = [w.staleness for w in windows.values() if w.epoch == row.epoch]
        assert row.mean_staleness == pytest.approx(sum(told) / len(told), rel=1e-12)
        assert row.max_staleness == max(told) > 0
    first = next(each for each in reports if isinstance(each, EpochSummary))
    assert first == outcome.history[0]


@settings(max_examples=40, deadline=None)
@given(
    changes=st.lists(st.floats(-3, 3), min_size=1, max_size=20),
    buffer=st.integers(1, 5),
    rate=st.floats(0.01, 2),
    momentum=st.floats(0, 0.99),
)
def test_it_is_the_papers_algorithm(
    changes: list[float], buffer: int, rate: float, momentum: float
) -> None:
    """Liu et al.'s, with pseudo-gradients: g = -change, and m, Delta of those."""
    update = DelayedNesterov(buffer, rate, momentum)
    (memory,) = new_memory(update, (Segment("parameters", torch.float64, 1),))
    theta = m = delta = 0.0
    center = torch.zeros(1, dtype=torch.float64)
    for number, change in enumerate(changes, 1):
        g = -change
        theta -= rate * g / buffer
        delta += g
        if number % buffer == 0:
            m = momentum * m + delta / buffer
            theta -= rate * momentum * m
            delta = 0.0
        moved = torch.tensor([change * update.scale(7)], dtype=torch.float64)
        update.step(center, moved, memory, Contributions((1,), 3, 7, number))
        center += moved
        np.testing.assert_allclose(center.item(), theta, rtol=1e-9, atol=1e-9)


def test_momentum_also_steps_where_the_nth_contribution_has_no_rows() -> None:
    update = DelayedNesterov(3, 0.7, 0.5)
    layout = (Segment("parameters", torch.float64, 1),)
    center = center_of(layout, [torch.zeros(1).double()], 3, CHANGES, update)
    expected = velocity = gathered = 0.0
    for number, change in enumerate([1.0, 2.0, None, 3.0, None, 4.0, None, None, None], 1):
        total = center.open_sum([0])
        total.declare(0, 0 if change is None else 5, update.scale(0))
        if change is not None:
            total.add(0, 0, torch.tensor([change]).double())
        center.commit(Contributions(() if change is None else (5,), 3))
        moved = (change or 0.0) / 3
        gathered += moved
        if number % 3 == 0:
            velocity, gathered = 0.5 * velocity + gathered, 0.0
            moved += 0.5 * velocity
        expected += 0.7 * moved
        assert center.values[0].item() == pytest.approx(expected, rel=1e-12)
