"""Who is waited for, and rounds that are cut off: when, and what becomes of who is late."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_keyword import open_averager
from decided import Told, do, told
from decisions import AllButStragglers, Calls, Run, commit, only, outcomes, report, started
from every_row import every, every_row

from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.cutoff import (
    BackupWorkers,
    Numbers,
    PredictedCutoff,
    RunTimes,
    best_cutoff,
)
from sparkdl.averager.round_policy import Nobody, RoundPolicy
from sparkdl.averager.values.center_update import Contributions
from sparkdl.averager.values.wire_format import BFLOAT16_CHANGES, FULL_PRECISION
from sparkdl.errors import ConfigError
from sparkdl.events import WindowReport
from sparkdl.protocols import Segment


def exchange(run: Run, rank: int, **window: Any) -> list[Told]:
    """A worker's contribution, and it takes what comes back."""
    decisions = run.contribute(rank, **window)
    run.take(rank)
    return decisions


class TestNobody:
    """Each worker alone with the center."""

    def run(self, world_size: int, **options: Any) -> Run:
        return started(world_size, policy=Nobody(), **options)

    def test_a_contribution_is_a_round_and_is_answered_at_once(self) -> None:
        run = self.run(3)
        assert run.close(1) == [do.open_sum((1,)), do.receive(run.members[1], 1)]
        assert run.add(1) == [
            commit(run, 1, share=1 / 3),
            do.report(report(1)),
            do.reply(run.members[1], final=False, values=True, worker_state=False),
        ]
        assert run.positions() == [0, 1, 0]

    def test_who_waits_is_let_in_in_the_order_of_arrival(self) -> None:
        run = self.run(4)
        for rank in (2, 3, 0, 1):
            run.close(rank)
        order = [2]
        while len(order) < 4:
            run.add(order[-1])
            (receive,) = only(do.receive, run.take(order[-1]))
            order.append(receive.member.rank)
        assert order == [2, 3, 0, 1]

    def test_staleness_counts_the_others_updates_since_the_center_was_sent(self) -> None:
        run = self.run(3)
        told = []
        for rank in (0, 0, 1, 2, 1, 0):
            # Rank 2 changes nothing.
            decisions = exchange(run, rank) if rank < 2 else run.close(rank, examples=0)
            run.take(rank)
            told += [decision.contributions for decision in only(do.commit, decisions)]
        assert [each.staleness for each in told] == [0, 0, 2, 0, 0, 2]
        assert told[-1] == Contributions((1,), 3, 2, share=1 / 3)

    def test_half_a_contribution_costs_nobody_else_anything(self) -> None:
        run = self.run(2, max_failures=1)
        run.close(0)
        run.close(1)
        assert run.lose(0) == [
            do.drop(run.members[0]),
            do.start_over(()),
            do.open_sum((1,)),
            do.receive(run.members[1], 1),
        ]

    def test_nobody_overwrites_the_center_that_others_are_still_sent_at_the_start(self) -> None:
        run = Run(2, policy=Nobody())
        for rank in run.ranks:
            run.join(rank)
            run.read(rank)
        run.start()
        run.take(0)
        assert run.close(0) == []
        assert run.take(1) == [do.open_sum((0,)), do.receive(run.members[0], 1)]

    def test_what_an_event_costs_does_not_depend_on_how_many_wait(self) -> None:
        assert self.calls(10) == self.calls(1000)

    def calls(self, world_size: int) -> int:
        """Calls of functions for an exchange, while all others wait for theirs."""
        run = self.run(world_size)
        for rank in run.ranks:
            run.close(rank)
        calls = Calls()
        gc.disable()  # what others have it call is none of the exchange
        try:
            with calls:
                run.add(0)
                run.take(0)
        finally:
            gc.enable()
        return calls.counted


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("policy", [Nobody, AllButStragglers])
def test_every_schedule_ends_as_its_faults_allow(policy: Callable[[], RoundPolicy]) -> None:
    ended = outcomes(policy, range(50))
    assert sum(outcome.failure is None for outcome in ended) > 32


@every("policy", [Nobody(), AllButStragglers(1)])
def test_changes_and_fragments_are_refused_where_not_all_get_each_of_them(
    policy: RoundPolicy,
) -> None:
    name, layout = type(policy).__name__, (Segment("parameters", torch.float32, 4),)
    for wire_format, fragments, words in (
        (BFLOAT16_CHANGES, 1, f"'bfloat16' .* with {name}"),
        (FULL_PRECISION, 2, f"2 fragments .* {name} lets them"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_averager(
                layout, [torch.zeros(4)], 2, wire_format, policy=policy, fragments=fragments
            )


NOBODY = np.empty((1, 0))


def exponential_order(count: int, shift: float) -> Numbers:
    """Means of the ordered times of ``count`` workers that take shift + Exp(1)."""
    return np.array([[shift + sum(1 / (count - i) for i in range(c)) for c in range(1, count + 1)]])


@every_row(
    (16, 1.0, 11, 5.24, 3.65),
    (64, 1.0, 44, 20.5, 11.1),
    (158, 1.0, 108, 50.4, 23.8),
    (158, 3.0, 131, 27.6, 18.3),
)
def test_the_best_cutoff_of_exponential_times_is_that_of_their_closed_form(
    count: int, shift: float, best: int, rate: float, everyone: float
) -> None:
    times = exponential_order(count, shift)
    assert best_cutoff(times, NOBODY) == best
    assert best / times[0, best - 1] == pytest.approx(rate, rel=5e-3)
    assert count / times[0, -1] == pytest.approx(everyone, rel=5e-3)


def fitted(times: Numbers) -> RunTimes:
    """A model that has seen some rounds, of shape (rounds, workers)."""
    model = RunTimes(times.shape[1])
    for round, row in enumerate(times):
        for rank, seconds in enumerate(row):
            model.note(rank, round, seconds)
    model.fit()
    return model


def medians(model: RunTimes, workers: int, lasted: float = 0.0) -> Numbers:
    return np.median(model.draw(range(workers), np.full(workers, lasted)), axis=0)


NOISE: dict[str, Callable[[np.random.Generator, int], Numbers]] = {
    "shifted exponential": lambda draw, n: 1 + draw.exponential(1, (30, n)),
    "one in twenty ten times as slow": lambda draw, n: (
        np.exp(0.1 * draw.normal(size=(30, n))) * np.where(draw.random((30, n)) < 0.05, 10, 1)
    ),
}


@every("noise", NOISE)
def test_with_noise_of_any_shape_the_cutoff_is_nearly_as_good_as_the_best(noise: str) -> None:
    draw = np.random.default_rng(1)
    model = fitted(NOISE[noise](draw, 40))
    chosen = best_cutoff(model.draw(range(40), np.zeros(40)), np.empty((128, 0)))
    truth = np.sort(np.concatenate([NOISE[noise](draw, 40) for _ in range(50)]), axis=1)
    rates = np.arange(1, 41) / truth.mean(axis=0)
    assert rates[chosen - 1] > 0.93 * rates.max()
    assert rates[-1] < 0.7 * rates.max()


def test_what_is_common_to_all_does_not_hide_who_is_slow() -> None:
    draw = np.random.default_rng(0)
    times = np.exp(0.02 * draw.normal(size=(20, 30))) * draw.lognormal(0, 1, (20, 1))
    times[:, 7] *= 1.5
    expected = medians(fitted(times), 30)
    assert expected[7] / np.median(expected) == pytest.approx(1.5, rel=0.03)
    # The errors of prediction are the workers' own too.
    drawn = fitted(times).draw(range(30), np.zeros(30))
    assert np.log(drawn[:, 0]).std() < 0.05


def test_a_window_that_lasts_is_drawn_from_what_is_still_possible() -> None:
    draw = np.random.default_rng(0)
    model = fitted(1 + draw.exponential(1, (20, 50)))
    drawn = model.draw(range(50), np.full(50, 2.0))
    assert drawn.min() >= 2
    # What is left of an exponential time is one.
    assert drawn.mean() == pytest.approx(3, rel=0.1)


def left_out(decisions: list[Told]) -> list[int]:
    return [skip.rank for skip in only(do.skip, decisions)]


def committed(decisions: list[Told]) -> list[tuple[int, int]]:
    """Who is part of the center now, and how stale."""
    events = [d.event for d in only(do.report, decisions) if isinstance(d.event, WindowReport)]
    return [(window.rank, window.staleness) for window in events]


def finish(run: Run, *ranks: int, **window: Any) -> list[Told]:
    """Contributions, and everybody who is sent a center takes it."""
    decisions = [each for rank in ranks for each in run.contribute(rank, **window)]
    for reply in only(do.reply, decisions):
        decisions += run.take(reply.member.rank)
    return decisions


class TestOneBackupWorker:
    """Three workers, of which one is not waited for."""

    def run(self, **options: Any) -> Run:
        return started(3, policy=BackupWorkers(1), **options)

    def test_a_round_is_over_when_two_have_contributed(self) -> None:
        run = self.run()
        assert left_out(run.contribute(2)) == []
        decisions = run.contribute(0)
        assert left_out(decisions) == [1]
        assert committed(decisions) == [(0, 0), (2, 0)]
        assert [reply.member.rank for reply in only(do.reply, decisions)] == [0, 2]

    def test_a_late_contribution_is_part_of_the_next_round_with_its_rows(self) -> None:
        run = self.run()
        finish(run, 0, 1)
        assert run.close(2, examples=7) == [
            do.open_sum((0, 1, 2)),
            do.receive(run.members[2], 7, staleness=1),
        ]
        run.add(2)
        decisions = run.contribute(0, step=2) + run.contribute(1, step=2)
        assert only(do.commit, decisions) == [do.commit(Contributions((1, 1, 7), 3, 1))]
        assert run.positions() == [2, 2, 1]

    def test_who_is_late_is_not_waited_for_and_counts_whenever_it_comes(self) -> None:
        run = self.run()
        for step in (1, 2, 3):
            assert committed(finish(run, 0, 1, step=step)) == [(0, 0), (1, 0)]
        run.contribute(2)
        assert committed(finish(run, 0, 1, step=4)) == [(0, 0), (1, 0), (2, 3)]

    def test_who_was_lost_while_it_was_late_begins_anew_and_is_not_late(self) -> None:
        run = self.run(max_failures=1)
        finish(run, 0, 1)
        run.lose(2)
        run.come_back(2)
        run.take(2)
        run.contribute(2)
        assert committed(finish(run, 0, step=2)) == [(0, 0), (2, 0)]

    def test_a_round_that_starts_over_has_left_nobody_out(self) -> None:
        run = self.run(max_failures=1)
        run.close(0)
        assert left_out(run.close(1)) == [2]
        assert only(do.start_over, run.lose(1)) == [do.start_over((run.members[0],))]
        # Rank 2 stands for one that is due: it has the center of the round that was begun.
        run.close(2)
        assert committed(run.add(2)) == [(2, 0)]

    def test_who_has_entered_late_is_late_also_when_the_round_starts_over(self) -> None:
        run = self.run(max_failures=1)
        finish(run, 0, 1)
        run.contribute(2)
        run.close(0, step=2)
        run.lose(0)
        assert run.coordinator.round.late == {2}
        run.close(2)
        assert left_out(run.add(2)) == []
        assert committed(run.contribute(1, step=2)) == [(1, 0), (2, 1)]


# In many schedules.


class Watched(Coordinator):
    """Looks at each commit: how many were left out of it, and how many who were not are stale."""

    most_left_out = 0
    most_due = 0
    stale = 0

    def _commit(self) -> None:
        present, before = set(self.ranks.active), dict(self._sent)
        updates, earlier = self._updates, len(self.do.decisions)
        super()._commit()
        ranks = {rank for rank, _ in committed(told(self.do.decisions[earlier:]))}
        fresh = {rank for rank in ranks if before[rank] == updates}
        Watched.most_left_out = max(Watched.most_left_out, len(present - ranks))
        Watched.most_due = max(Watched.most_due, len(present) - len(fresh))
        Watched.stale += len(ranks - fresh)


@pytest.mark.usefixtures("quiet")
@pytest.mark.nightly_variants
@pytest.mark.parametrize("spared", [1, 2])
def test_in_every_schedule_all_but_so_many_are_in_a_round_and_not_stale(spared: int) -> None:
    Watched.most_left_out = Watched.most_due = Watched.stale = 0
    ended = outcomes(lambda: BackupWorkers(spared), range(40), 3, Watched)
    assert sum(outcome.failure is None for outcome in ended) > 26
    assert sum(outcome.losses for outcome in ended) > 8
    assert sum(outcome.checkpoints for outcome in ended) > 26
    assert (Watched.most_left_out, Watched.most_due) == (spared, spared)
    assert Watched.stale > 40


# Predicted.


class Cluster:
    """Workers that take so many seconds for a window, all through one epoch.

    Args:
        seconds: by rank.
        between_s: from the end of a round until its center was taken.
    """

    def __init__(self, *seconds: float, between_s: float = 0.0, **options: Any) -> None:
        self.policy = PredictedCutoff()
        self.run = started(len(seconds), policy=self.policy, **options)
        self.seconds = list(seconds)
        self.between_s = between_s
        self.due = {rank: self.run.now + each for rank, each in enumerate(seconds)}
        self.steps = [0] * len(seconds)

    def round(self) -> set[int]:
        """Let time pass until something is committed; returns who is part of it."""
        while True:
            rank = min(self.due, key=lambda each: (self.due[each], each))
            self.run.now = max(self.run.now, self.due.pop(rank))
            self.steps[rank] += 1
            decisions = self._receive(self.run.close(rank, step=self.steps[rank]))
            if ranks := {rank for rank, _ in committed(decisions)}:
                self.run.now += self.between_s
                for reply in only(do.reply, decisions):
                    rank = reply.member.rank
                    self.due[rank] = self.run.now + self.seconds[rank]
                    self._receive(self.run.take(rank))  # and who was late by little contributes
                return ranks

    def _receive(self, decisions: list[Told]) -> list[Told]:
        received = only(do.receive, decisions)
        return [each for receive in received for each in self.run.add(receive.member.rank)]


ALL = {0, 1, 2, 3}


def test_until_times_are_known_and_while_they_are_alike_everyone_is_waited_for() -> None:
    cluster = Cluster(1.0, 1.01, 0.99, 1.0)
    assert [cluster.round() for _ in range(10)] == [ALL] * 10


def test_who_has_become_slow_is_left_out_from_the_next_round_until_it_has_come() -> None:
    cluster = Cluster(1.0, 1.01, 0.99, 1.0)
    for _ in range(8):
        cluster.round()
    cluster.seconds[2] = cluster.due[2] = 9.5
    cluster.due[2] += cluster.run.now
    assert cluster.round() == ALL  # nobody could know
    assert not any(2 in cluster.round() for _ in range(8))
    assert any(2 in cluster.round() for _ in range(3))


def test_one_that_is_slower_than_is_remembered_holds_nobody_up() -> None:
    cluster = Cluster(1.0, 1.01, 0.99, 60.0)
    while cluster.round() == ALL:
        pass
    began, rounds = cluster.run.now, [cluster.round() for _ in range(150)]
    assert cluster.run.now - began < 1.1 * 150
    assert sum(3 in ranks for ranks in rounds) == 2


def test_where_rounds_themselves_take_long_the_slow_are_waited_for() -> None:
    quick, slow = (Cluster(1.0, 1.0, 1.0, 2.0, between_s=seconds) for seconds in (0.0, 9.0))
    for cluster in (quick, slow):
        for _ in range(8):
            cluster.round()
    assert any(quick.round() != ALL for _ in range(4))
    assert all(slow.round() == ALL for _ in range(4))


def test_one_that_is_due_and_lost_is_not_replaced_by_one_that_is_late() -> None:
    cluster = Cluster(1.0, 1.1, 0.9, 50.0, max_failures=1)
    while cluster.round() == ALL:
        pass
    run, policy = cluster.run, cluster.policy
    step = max(cluster.steps) + 1
    run.now += 1
    run.contribute(2, step=step)
    run.contribute(0, step=step)
    decisions = run.lose(1)
    assert policy._spared == 1
    assert {rank for rank, _ in committed(decisions)} == {0, 2}


@pytest.mark.usefixtures("quiet")
def test_every_schedule_with_predicted_cutoffs_ends_as_its_faults_allow() -> None:
    Watched.most_left_out = Watched.stale = 0
    ended = outcomes(PredictedCutoff, range(40), 3, Watched)
    assert sum(outcome.failure is None for outcome in ended) > 26
    assert sum(outcome.losses for outcome in ended) > 8
    assert Watched.most_left_out > 1
    assert Watched.stale > 8


def test_who_contributes_before_it_is_known_to_have_the_center_is_timed_as_any() -> None:
    cluster = Cluster(1.0, 1.0, 1.0, 2.0)
    for _ in range(8):
        cluster.round()
    run, step = cluster.run, max(cluster.steps) + 1
    run.now += 1
    for rank in (0, 1, 2):
        run.contribute(rank, step=step)
    run.now += 1
    run.close(0, step=step + 1)  # it was sent the reply, and nobody knows that it was taken
    run.take()
    assert cluster.policy._closed[0] == run.now


@pytest.mark.nightly
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(each, marks=pytest.mark.nightly) for each in range(1, 10))]
)
@pytest.mark.parametrize("policy", [partial(BackupWorkers, 1), PredictedCutoff])
def test_ten_thousand_schedules_end_as_their_faults_allow(
    policy: Callable[[], RoundPolicy], part: int
) -> None:
    ended = outcomes(policy, range(part, 10_000, 10), 3)
    assert sum(outcome.failure is None for outcome in ended) > 640
    assert sum(outcome.losses for outcome in ended) > 200
