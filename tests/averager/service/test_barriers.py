"""Barrier control: who waits, for whom, until when; what that costs; and what a loss changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from decided import Told, do
from decisions import Calls, Every, Run, commit, expect_failure, only, outcomes, report, started
from every_row import every, every_row
from support.simulation.plan import random_plan
from support.simulation.run import Outcome, simulate

from sparkdl.averager.run_events import Position, Progress
from sparkdl.errors import ConfigError, TrainingError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.strategies import ASP, BSP, PBSP, PSSP, SSP, Barrier, Softsync
from sparkdl.strategies.asynchronous_barriers import SampledStaleness

MANY = 99
"""More than any world or epoch here has."""


def run_of(world_size: int, barrier: Barrier, **options: Any) -> Run:
    return started(world_size, policy=barrier.policy(1), **options)


def going_on(decisions: list[Told]) -> set[int]:
    """Who is sent a center."""
    sent = [d for d in decisions if isinstance(d, (do.reply, do.welcome))]
    return {decision.member.rank for decision in sent}


class Steps:
    """Workers that contribute one window after the other, and take what they are sent."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.done = Counter[int]()

    def step(self, rank: int, **window: Any) -> set[int]:
        """A rank's next window; returns who goes on."""
        self.done[rank] += 1
        steps = {"step": self.done[rank], "steps": self.done[rank]}
        decisions = contribute(self.run, rank, **{**steps, **window})
        self.run.take()
        return going_on(decisions)


def contribute(run: Run, rank: int, steps: int, **window: Any) -> list[Told]:
    """A contribution with its step in the epoch."""
    told = replace(report(rank, **window), step_of_epoch=steps)
    return run.tell("window_closed", run.members[rank], told) + run.add(rank)


class TestOneBound:
    """Two workers, of which one may be a window ahead: every barrier that says so."""

    @pytest.fixture(params=[SSP(1), PSSP(1, 1), PSSP(MANY, 1)], ids=str)
    def steps(self, request: pytest.FixtureRequest) -> Steps:
        return Steps(run_of(2, request.param, max_failures=3))

    def test_a_contribution_changes_the_center_at_once(self, steps: Steps) -> None:
        for number in (1, 2):
            decisions = contribute(steps.run, 0, steps=number, step=number)
            assert only(do.commit, decisions) == [commit(steps.run, 1, share=1 / 2)]
            steps.run.take(0)
        assert steps.run.positions() == [2, 0]

    def test_who_is_too_far_ahead_goes_on_when_the_other_is_near(self, steps: Steps) -> None:
        assert steps.step(0) == {0}
        assert steps.step(0) == set()
        assert steps.step(1) == {0, 1}
        assert steps.step(1) == {1}

    def test_who_has_ended_the_epoch_is_not_waited_for(self, steps: Steps) -> None:
        steps.step(0)
        assert steps.step(0) == set()
        assert steps.step(1, last=True) == {0}

    def test_in_the_next_epoch_all_begin_again(self, steps: Steps) -> None:
        steps.step(0)
        steps.step(0)
        steps.step(1, last=True)
        assert steps.step(0, last=True) == {0, 1}
        steps.done.clear()
        assert steps.step(0, epoch=2) == {0}
        assert steps.step(0, epoch=2) == set()

    def test_who_comes_back_is_waited_for_until_it_is_within_the_bound(self, steps: Steps) -> None:
        steps.step(0)
        steps.run.lose(1)
        for _ in range(4):
            assert steps.step(0) == {0}
        assert going_on(steps.run.come_back(1)) == {1}
        steps.run.take()
        assert steps.step(0) == set()  # what it had begun, its sixth
        assert [steps.step(1) for _ in range(5)] == [{1}, {1}, {1}, {1}, {0, 1}]

    def test_who_waits_is_lost_and_comes_back_contributes_when_it_may(self, steps: Steps) -> None:
        run = steps.run
        steps.step(0)
        steps.step(0)
        run.lose(0)
        assert going_on(run.come_back(0)) == {0}
        run.take()
        assert run.close(0, step=3) == []
        contribute(run, 1, steps=1)
        assert run.take(1) == [do.open_sum((0,)), do.receive(run.members[0], 1, 1)]

    def test_who_waits_and_contributes_is_an_error(self, steps: Steps) -> None:
        steps.step(0)
        steps.step(0)
        decisions = steps.run.close(0, step=3)
        words = "rank 0 contributed a window out of order"
        expect_failure(steps.run, decisions, TrainingError, words)


def test_with_no_bound_at_all_everyone_waits_for_everyone() -> None:
    for barrier in (SSP(0), PBSP(2), PBSP(MANY)):
        steps = Steps(run_of(3, barrier))
        for order in ((2, 0, 1), (0, 1, 2)):
            assert [steps.step(rank) for rank in order] == [set(), set(), {0, 1, 2}]


def test_a_checkpoint_has_the_worker_states_of_those_who_wait() -> None:
    run = run_of(3, SSP(0), checkpoints=Every(2))
    contribute(run, 0, steps=1)
    run.take()
    decisions = contribute(run, 1, steps=1)
    asked = {decision.member.rank for decision in only(do.ask_worker_state, decisions)}
    assert asked == run.coordinator.checkpoints.awaited == {0, 1}
    for rank in asked:
        run.tell("worker_state_written", run.members[rank])
    run.tell("checkpoint_ended", saved=True)
    decisions = contribute(run, 2, steps=1)
    assert going_on(decisions) == {0, 1, 2}
    assert only(do.ask_worker_state, decisions) == []


@every("barrier", [SSP(1), PSSP(MANY, 1)])
def test_a_resumed_run_has_those_wait_who_were_ahead_when_they_have_trained(
    barrier: Barrier,
) -> None:
    progress = replace(
        Progress.start(3), positions=tuple(Position(step=n, step_of_epoch=n) for n in (4, 2, 3))
    )
    run = Run(3, policy=barrier.policy(1), progress=progress)
    for rank in run.ranks:
        run.join(rank)
        run.read(rank)
    assert going_on(run.start()) == {0, 1, 2}
    run.take()
    assert run.close(0, step=5) == []
    contribute(run, 1, steps=3, step=3)
    assert only(do.receive, run.take(1)) == [do.receive(run.members[0], 1, 1)]


def test_a_window_is_a_period_of_steps() -> None:
    run = started(2, policy=SSP(1).policy(5))
    assert going_on(contribute(run, 0, steps=5)) == {0}
    run.take()
    assert going_on(contribute(run, 0, steps=10)) == set()
    assert going_on(contribute(run, 1, steps=5)) == {0, 1}


class TestSoftsync:
    """The first contributions are an update."""

    def test_the_others_contribute_to_the_next_what_is_stale(self) -> None:
        run = run_of(3, Softsync(2))
        run.contribute(2)
        assert run.close(0) == [do.receive(run.members[0], 1), do.skip(1)]
        assert only(do.commit, run.add(0)) == [commit(run, 1, 1, share=2 / 3)]
        run.take(0, 2)
        assert run.close(1) == [do.open_sum((0, 1, 2)), do.receive(run.members[1], 1, 1)]
        run.add(1)
        decisions = run.contribute(2, step=2)
        assert only(do.commit, decisions) == [commit(run, 1, 1, staleness=1, share=2 / 3)]
        told = [d.event for d in only(do.report, decisions) if isinstance(d.event, WindowReport)]
        assert [(window.rank, window.staleness) for window in told] == [(1, 1), (2, 0)]


def test_staleness_is_in_the_epochs_summary() -> None:
    run = run_of(2, ASP())
    for rank, steps in ((0, 1), (0, 2), (1, 1)):
        contribute(run, rank, steps=steps, step=steps)
        run.take()
    contribute(run, 0, steps=3, last=True)
    told = only(do.report, contribute(run, 1, steps=1, examples=0, last=True))
    (summary,) = [each.event for each in told if isinstance(each.event, EpochSummary)]
    # Rank 1 has missed two updates, then rank 0 one; without rows there is nothing stale.
    assert (summary.mean_staleness, summary.max_staleness) == (3 / 4, 2)


@every("wrong", [-1, 1.5, True, None, "2"])
@every_row(
    (SSP, r"s must be a whole number of windows >= 0, got "),
    (PBSP, r"beta must be a whole number of workers >= 0, got "),
    (lambda value: PSSP(value, 1), r"beta must be a whole number of workers >= 0, got "),
    (lambda value: PSSP(1, value), r"s must be a whole number of windows >= 0, got "),
    (Softsync, r"n must be a whole number of contributions >= 1, got "),
)
def test_numbers_that_make_no_sense_are_refused(
    wrong: object, barrier: Callable[[Any], Barrier], words: str
) -> None:
    with pytest.raises(ConfigError, match=words + repr(wrong)):
        barrier(wrong)
    with pytest.raises(ConfigError, match="n must be"):
        Softsync(0)


# Samples.


class Watched(SampledStaleness):
    """Samples that are said."""

    said: list[list[int]]

    def _sample(self, rank: int) -> list[int]:
        return self.said.pop(0)


def test_a_sample_stays_until_all_of_it_are_near_and_the_next_is_another() -> None:
    policy = Watched(2, 0, 1)
    policy.said = [[1, 2], [], [], [3]]
    steps = Steps(started(4, policy=policy))
    assert steps.step(0) == set()
    assert steps.step(1) == {1}
    assert steps.step(2) == {0, 2}
    assert steps.step(0) == set()
    assert steps.step(3, last=True) == {0}


# What an answer costs.


def calls_a_window(world_size: int, barrier: Barrier) -> float:
    """Calls of functions for a contribution, as the mean over three of each rank."""
    run = run_of(world_size, barrier)
    calls = Calls()
    for window in (1, 2, 3):
        for rank in run.ranks:
            with calls:
                decisions = contribute(run, rank, steps=window, step=window)
            run.take(*going_on(decisions)) if going_on(decisions) else None
    return calls.counted / (3 * world_size)


@every("barrier", [SSP(1), PSSP(4, 1)])
def test_what_a_contribution_costs_does_not_grow_with_the_workers(barrier: Barrier) -> None:
    assert calls_a_window(250, barrier) < 1.25 * calls_a_window(20, barrier)


# In many schedules.


def ended_by(barrier: Barrier, seeds: range) -> list[Outcome]:
    """How runs end whose epochs have up to six windows."""
    return outcomes(lambda: barrier.policy(1), seeds, 2)


@pytest.mark.nightly_variants(every=3)
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("barrier", "limit"),
    [
        (PBSP(0), ASP()),
        (SSP(MANY), ASP()),
        (PSSP(2, MANY), ASP()),
        (PBSP(MANY), SSP(0)),
        (PSSP(MANY, 1), SSP(1)),
    ],
    ids=str,
)
def test_limits_decide_the_same_in_every_schedule(barrier: Barrier, limit: Barrier) -> None:
    for mine, other in zip(ended_by(barrier, range(15)), ended_by(limit, range(15)), strict=True):
        assert replace(mine, failure=None) == replace(other, failure=None)
        assert repr(mine.failure) == repr(other.failure)


@pytest.mark.usefixtures("quiet")
def test_softsync_of_everyone_decides_like_bsp_in_every_schedule_without_faults() -> None:
    """Its workers wait for leave to enter, so faults strike them at other times."""
    for seed in range(12):
        plan = replace(random_plan(seed, times=2), faults=())
        mine, other = (
            simulate(plan, policy=lambda: barrier.policy(1))  # noqa: B023
            for barrier in (Softsync(MANY), BSP())
        )
        assert replace(mine, seconds=0) == replace(other, seconds=0)
