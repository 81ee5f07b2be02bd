"""Rounds that are cut off: when they are over, who is late, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from decided import Told, do, told
from decisions import Run, only, outcomes, started

from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.cutoff import BackupWorkers, PredictedCutoff
from sparkdl.averager.round_policy import RoundPolicy
from sparkdl.averager.values.center_update import Contributions
from sparkdl.events import WindowReport


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
