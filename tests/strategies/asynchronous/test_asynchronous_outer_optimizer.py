"""Delayed Nesterov: the paper's algorithm, its limits, and what the commits give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_keyword import center_of
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import Delayed, recorded_decisions
from toys import relative_error
from trainings import DATA, job

from sparkdl.averager.values.center_update import new_memory
from sparkdl.protocols import Segment
from sparkdl.strategies import CHANGES, AsynchronousOuterOptimizer, Contributions, DelayedNesterov
from sparkdl.testing import run_world

STRATEGY = AsynchronousOuterOptimizer(DelayedNesterov(3, 0.7, 0.5), period=2)


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


def grows_by(reach: float, workers: int, momentum: float) -> float:
    """By how much a round multiplies the distance from a parabola's minimum; numpy alone.

    One worker after another contributes -reach times where the center was when it last did.
    """

    def one_round(state: np.ndarray) -> np.ndarray:
        center, velocity, *begun = state
        gathered = 0.0
        for rank in range(workers):
            change = -reach * begun[rank] / workers
            center += 0.7 * change
            gathered += change
            if rank == workers - 1:
                velocity = momentum * velocity + gathered
                center += 0.7 * momentum * velocity
            begun[rank] = center
        return np.array([center, velocity, *begun])

    columns = [one_round(unit) for unit in np.eye(2 + workers)]
    return float(np.abs(np.linalg.eigvals(np.stack(columns, axis=1))).max())


@every(("workers", "momentum", "reach"), [(4, 0.9, 1.08), (8, 0.9, 0.81), (4, 0.5, 1.64)])
def test_changes_that_are_a_round_old_are_stable_up_to_windows_of_some_length(
    workers: int, momentum: float, reach: float
) -> None:
    assert grows_by(reach * 0.98, workers, momentum) < 1 < grows_by(reach * 1.02, workers, momentum)
    update = DelayedNesterov(workers, 0.7, momentum)
    for factor in (0.9, 1.1):
        (memory,) = new_memory(update, (Segment("parameters", torch.float64, 1),))
        center = torch.ones(1, dtype=torch.float64)
        begun = [center.clone() for _ in range(workers)]
        for number in range(250 * workers):
            before = begun[number % workers]
            change = -factor * reach * before * update.scale(workers - 1)
            update.step(center, change, memory, Contributions((1,), workers, 3, number + 1))
            center += change
            begun[number % workers] = center.clone()
        distance = max(abs(each.item()) for each in begun)
        assert distance < 0.1 if factor < 1 else distance > 1


def test_the_center_is_what_the_decisions_say() -> None:
    with recorded_decisions() as decisions:
        outcome = run_world(job(strategy=STRATEGY), DATA.shards())
    oracle = Delayed(DATA, 3, 0.7, 0.5).follow(decisions)
    assert relative_error(outcome.module, oracle) < 1e-9
    assert outcome.history[-1].max_staleness > 0
