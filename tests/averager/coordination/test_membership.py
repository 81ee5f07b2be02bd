"""Who is in a run: what losses it survives, and how long anybody may be silent."""

from __future__ import annotations

import pytest
from every_row import every

from sparkdl.averager.coordination.events import Member
from sparkdl.averager.coordination.membership import (
    GAP_TICKS,
    STRAGGLER_S,
    STRAGGLER_WINDOWS,
    FencedError,
    Membership,
    Tolerance,
)
from sparkdl.errors import TrainingError, WorkerLostError


def crew(world_size: int, max_failures: int = 0, *, deadline_s: float = 60.0) -> Membership:
    return Membership(world_size, deadline_s, Tolerance(max_failures), now=0.0)


def measured(members: Membership, rank: int, seconds: float) -> None:
    """A rank finishes a window that takes so long."""
    members.begin_window(rank, 0.0)
    members.end_window(rank, seconds)


def test_a_rank_of_the_run_joins_once() -> None:
    members, first = crew(2), Member(0, "a")
    assert members.join(first, 1.0) is None
    assert members.of(0) is first
    assert (members.there, members.ever_joined, members.joined) == ({0}, {0}, 1)
    with pytest.raises(
        TrainingError, match="rank 0 joined from b, but it had already joined from a"
    ):
        members.join(Member(0, "b", attempt=1), 2.0)


@every("rank", [2, -1])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(TrainingError, match=rf"rank {rank} on here joined a run of 2 workers"):
        crew(2).join(Member(rank, "here"), 0.0)


def test_a_later_attempt_takes_the_place_of_an_earlier_and_not_the_other_way() -> None:
    members, before, later = crew(1, 3), Member(0, "b", attempt=5), Member(0, "c", attempt=6)
    members.join(before, 0.0)
    with pytest.raises(FencedError, match="attempt 4 of rank 0 on a is out of date: attempt 5"):
        members.join(Member(0, "a", attempt=4), 0.0)
    assert members.join(later, 0.0) is before
    assert members.of(0) is later


def test_who_was_known_to_be_lost_is_not_replaced() -> None:
    members, before = crew(1, 3), Member(0, "a")
    members.join(before, 0.0)
    members.lose(before, "was killed", 1.0)
    assert members.there == set()
    assert members.join(Member(0, "b", attempt=1), 2.0) is None
    assert members.there == {0}
    assert members.last_loss(0) == "rank 0 on a was killed"


def test_the_loss_of_who_was_replaced_does_not_take_its_successor_away() -> None:
    members, before = crew(1, 3), Member(0, "a")
    members.join(before, 0.0)
    members.join(Member(0, "b", attempt=1), 1.0)
    members.lose(before, "was replaced", 1.0)
    assert members.there == {0}


def test_last_losses_are_not_mixed_up_between_ranks_of_similar_numbers() -> None:
    members = crew(20, 5)
    for rank in (1, 12):
        member = Member(rank, "a")
        members.join(member, 0.0)
        members.lose(member, f"fell {rank}", 0.0)
    assert members.last_loss(1) == "rank 1 on a fell 1"
    assert members.last_loss(2) == ""


class TestCounting:
    """What counts as a loss."""

    @staticmethod
    def lose(
        members: Membership, rank: int, *, task: int, attempt: int = 0
    ) -> WorkerLostError | None:
        member = Member(rank, "a", attempt, task)
        members.join(member, 0.0)
        return members.lose(member, "was killed", 0.0)

    def test_workers_that_are_lost_with_their_task_are_one_loss(self) -> None:
        members = crew(6, 2)
        assert [self.lose(members, rank, task=0, attempt=5) for rank in (0, 1, 2)] == [None] * 3
        assert [self.lose(members, rank, task=0, attempt=9) for rank in (0, 1, 2)] == [None] * 3
        error = self.lose(members, 3, task=1)
        assert error is not None
        assert "7 workers were lost, more than maxFailures allows (2): " in str(error)

    def test_a_worker_that_is_lost_twice_in_one_attempt_is_two_losses(self) -> None:
        members = crew(2, 1)
        assert self.lose(members, 0, task=0) is None
        assert self.lose(members, 0, task=0) is not None

    def test_without_tolerance_the_error_is_the_loss_itself(self) -> None:
        error = self.lose(crew(2), 1, task=1)
        assert str(error) == "rank 1 on a was killed"


class TestPatience:
    """How long a rank may be silent."""

    @staticmethod
    def joined(max_failures: int = 3) -> Membership:
        members = crew(2, max_failures)
        members.join(Member(0, "a"), 0.0)
        return members

    def test_it_is_the_deadline_before_a_window_was_measured(self) -> None:
        assert self.joined().patience_s(0) == 60.0

    @every(
        ("window_s", "granted_s"),
        [(1.0, STRAGGLER_S), (8.0, 8.0 * STRAGGLER_WINDOWS), (100.0, 60.0)],
    )
    def test_it_grows_with_the_longest_window(self, window_s: float, granted_s: float) -> None:
        members = self.joined()
        measured(members, 0, window_s)
        measured(members, 0, window_s / 2)
        assert members.patience_s(0) == granted_s

    def test_it_doubles_after_a_drop_and_stays_below_the_deadline(self) -> None:
        members = self.joined()
        measured(members, 0, 1.0)
        for granted_s in (15.0, 30.0, 60.0, 60.0):
            assert members.patience_s(0) == granted_s
            members.double_patience()

    @every("max_failures", [0, 3])
    def test_who_cannot_be_dropped_has_the_deadline(self, max_failures: int) -> None:
        members = self.joined(max_failures)
        measured(members, 0, 1.0)
        assert members.patience_s(0 if max_failures == 0 else 1) == 60.0

    def test_whose_rows_still_arrive_has_the_deadline_and_is_not_measured(self) -> None:
        members = self.joined()
        members.note_reading(0, reading=True)
        measured(members, 0, 1.0)
        members.note_reading(0, reading=False)
        assert members.patience_s(0) == 60.0

    def test_signs_of_life_do_not_shorten_the_window_that_is_measured(self) -> None:
        members = self.joined()
        members.begin_window(0, 0.0)
        members.note_heartbeat(0, 7.9)
        members.end_window(0, 8.0)
        assert members.patience_s(0) == 8.0 * STRAGGLER_WINDOWS

    def test_a_window_is_measured_once_and_only_if_it_was_begun(self) -> None:
        members = self.joined()
        measured(members, 0, 1.0)
        members.end_window(0, 50.0)
        assert members.patience_s(0) == STRAGGLER_S

    def test_a_wait_of_all_is_no_part_of_a_window(self) -> None:
        members = self.joined()
        members.begin_window(0, 0.0)
        members.restart_clock(9.0)
        members.end_window(0, 10.0)
        assert members.patience_s(0) == STRAGGLER_S


class TestSilence:
    """Whose last message is too long ago."""

    def test_it_counts_from_the_last_message(self) -> None:
        members = crew(2, deadline_s=10)
        members.note_heartbeat(1, 5.0)
        assert members.overdue({0, 1}, 9.9) == set()
        assert members.overdue({0, 1}, 10.0) == {0}
        assert members.overdue({1}, 14.9) == set()
        assert members.overdue({0, 1}, 15.0) == {0, 1}

    def test_only_those_are_overdue_who_are_waited_for(self) -> None:
        assert crew(3, deadline_s=10).overdue({1}, 99.0) == {1}

    def test_it_starts_over_when_something_has_happened_that_all_waited_for(self) -> None:
        members = crew(1, deadline_s=10)
        members.restart_clock(8.0)
        assert members.overdue({0}, 17.9) == set()
        assert members.overdue({0}, 18.0) == {0}

    def test_in_its_turn_it_counts_from_the_end_of_the_turn_before(self) -> None:
        members = crew(1, deadline_s=10)
        members.pass_turn(8.0)
        assert members.overdue({0}, 10.0) == {0}
        assert not members.overdue_in_its_turn(0, 17.9)
        assert members.overdue_in_its_turn(0, 18.0)

    def test_a_late_look_at_the_clock_says_nothing_and_begins_anew(self) -> None:
        members = crew(1, deadline_s=10)
        assert not members.look(GAP_TICKS * members.tick_s)
        late = 2 * GAP_TICKS * members.tick_s + 1
        assert members.look(late)
        assert members.overdue({0}, late + 9.9) == set()
        assert not members.look(late + 1)

    @every(("deadline_s", "tick_s"), [(60.0, 1.0), (2.0, 0.5)])
    def test_the_clock_is_looked_at_at_least_four_times_a_deadline(
        self, deadline_s: float, tick_s: float
    ) -> None:
        assert crew(1, deadline_s=deadline_s).tick_s == tick_s


def test_ranks_are_named_with_their_hosts_in_order() -> None:
    members = crew(3)
    members.join(Member(2, "c"), 0.0)
    members.join(Member(0, "a"), 0.0)
    assert members.name({2, 1, 0}) == "rank 0 on a, rank 1, rank 2 on c"
