"""Rounds whose members are lost or late: what is done without them, and how they come back."""

from __future__ import annotations

from typing import Any

from decided import Told, do
from decisions import AllButStragglers, Run, commit, expect_failure, only, report, shard
from decisions import started as started_with
from every_row import every, every_row

from sparkdl.averager.coordination.membership import STRAGGLER_S, STRAGGLER_WINDOWS, Member
from sparkdl.averager.coordination.rank_states import RankState
from sparkdl.averager.round_policy import All, RoundPolicy
from sparkdl.errors import DataError, DeadlineError, WorkerLostError
from sparkdl.events import ValidationReport


def started(world_size: int, *, max_failures: int = 5, **options: object) -> Run:
    return started_with(world_size, max_failures=max_failures, **options)


def replied_to(decisions: list[Told]) -> list[int]:
    """The ranks that are told the outcome of the round."""
    return [reply.member.rank for reply in only(do.reply, decisions)]


class TestRounds:
    """What becomes of a round when one who takes part is lost."""

    def test_half_a_contribution_makes_the_others_start_over(self) -> None:
        run = started(2)
        run.close(0)
        run.close(1)
        again = do.start_over((run.members[1],))
        assert run.lose(0) == [do.drop(run.members[0]), again]
        assert run.close(1) == [do.open_sum((1,)), do.receive(run.members[1], 1)]
        assert replied_to(run.add(1)) == [1]
        assert run.positions() == [0, 1]

    def test_a_contribution_that_became_whole_as_the_sum_was_started_over_does_not_count(
        self,
    ) -> None:
        """Its last bytes and the loss of another worker can arrive at the same time."""
        run = started(3)
        run.close(0)
        run.close(1)
        assert do.start_over((run.members[0],)) in run.lose(1)
        assert run.add(0) == []
        run.lose(0)
        assert only(do.commit, run.contribute(2)) == [commit(run, 1)]
        assert run.positions() == [0, 0, 1]

    @every("policy", [All(), AllButStragglers(0)])
    def test_a_lost_rank_that_had_contributed_does_not_stand_for_one_who_has_yet_to(
        self, policy: RoundPolicy
    ) -> None:
        run = started(3, policy=policy)
        run.contribute(0)
        run.lose(0)
        assert run.contribute(1) == [do.receive(run.members[1], 1)]
        assert only(do.commit, run.contribute(2)) == [commit(run, 1, 1, 1)]

    def test_it_is_committed_once_anybody_is_back_although_all_were_lost(self) -> None:
        run = started(2)
        run.contribute(0)
        run.lose(0)
        run.lose(1)
        assert run.positions() == [0, 0]
        assert run.come_back(1) == [
            commit(run, 1),
            do.report(report(0)),
            do.welcome(run.members[1]),
        ]
        assert run.positions() == [1, 0]


class TestComingBack:
    """A worker that comes back continues after its last committed window."""

    def test_it_takes_part_again_behind_its_last_commit(self) -> None:
        run = started(2)
        run.round(step=1)
        run.lose(0)
        assert run.close(1, step=2) == [do.open_sum((1,)), do.receive(run.members[1], 1)]
        run.add(1)
        run.take(1)
        assert run.come_back(0) == [do.welcome(run.members[0])]
        assert run.positions() == [1, 2]
        run.take(0)
        assert replied_to(run.round(step=3)) == [0, 1]

    def test_a_round_starts_over_for_one_whose_rows_another_may_have_to_fetch(self) -> None:
        run = started(3)
        run.lose(0)
        run.contribute(1)
        server = ["elsewhere", 4711]
        decisions = run.come_back(0, row_server=server)
        assert decisions == [do.start_over((run.members[1],)), do.welcome(run.members[0])]
        run.take(0)
        assert only(do.commit, run.round(0, 1, 2)) == [commit(run, 1, 1, 1)]

    def test_a_round_in_which_all_contribute_ends_before_one_comes_back_who_serves_rows(
        self,
    ) -> None:
        run = started(3)
        run.lose(0)
        run.contribute(1)
        run.close(2)
        assert run.come_back(0, row_server=["elsewhere", 4711]) == []
        assert run.add(2)[-1] == do.welcome(run.members[0])

    def test_an_epoch_does_not_end_before_a_lost_rank_is_through_with_it(self) -> None:
        run = started(2)
        run.lose(0)
        assert replied_to(run.contribute(1, last=True)) == []
        run.come_back(0)
        run.take(0)
        assert replied_to(run.contribute(0, last=True)) == [1, 0]
        assert [epoch.examples for epoch in run.coordinator.committed.history] == [2]

    def test_a_rank_that_was_through_with_its_epoch_says_so_once_more(self) -> None:
        run = started(2)
        run.contribute(0, last=True)
        run.contribute(1)
        run.lose(0)
        run.take(1)
        run.come_back(0)
        run.take(0)
        assert run.close(0, last=True, examples=0) == [do.open_sum((0, 1)), do.skip(0)]
        assert replied_to(run.contribute(1, last=True)) == [0, 1]
        assert [epoch.examples for epoch in run.coordinator.committed.history] == [3]

    def test_other_rows_than_before_are_refused(self) -> None:
        run = started(2)
        run.lose(0)
        run.join(0, attempt=1)
        decisions = run.read(0, shard(7))
        words = r"read different rows \(7 rows now, 1 then\)"
        expect_failure(run, decisions, DataError, words)

    def test_rows_with_nan_are_the_same_when_they_are_read_again(self) -> None:
        run = Run(1, max_failures=1)
        run.join(0)
        run.read(0, shard(smallest=float("nan")))
        run.start()
        run.lose(0)
        run.join(0, attempt=1)
        # Another NaN, as from another process.
        assert run.read(0, shard(smallest=float("nan"))) == [do.welcome(run.members[0])]

    def test_for_a_rank_that_has_finished_nobody_joins(self) -> None:
        run = started(2)
        run.round(last=True)
        run.finish(0)
        reason = "rank 0 has already finished its last epoch"
        assert run.join(0, attempt=1) == [do.refuse(run.members[0], reason)]
        assert run.finish(1)[-1] == do.end(None)


class TestFencing:
    """An earlier attempt is fenced off, and a later one takes its place."""

    def test_the_earlier_attempt_is_refused(self) -> None:
        run = started(2)
        run.join(0, 5, "b")
        words = "attempt 4 of rank 0 on a is out of date: attempt 5 runs on b"
        assert run.join(0, 4, "a") == [do.refuse(run.members[0], words)]
        assert run.failure is None

    def test_the_later_attempt_has_the_earlier_dropped(self) -> None:
        run = started(2)
        before = run.members[0]
        assert run.join(0, 6, "c") == [do.drop(before)]
        lost = "rank 0 on host-0 was replaced before its connection was known to be lost"
        assert run.coordinator.members.losses == [lost]
        assert run.coordinator.members.there == {0, 1}

    def test_whose_place_was_taken_says_nothing_in_its_successors_name(self) -> None:
        validation = ValidationReport(rank=0, epoch=1, examples=1, loss_sum=0.0, weight=1.0)
        said: list[tuple[str, Any]] = [
            ("rows_found", [shard()]),
            ("gave", [""]),
            ("window_closed", [report(0)]),
            ("contributed", []),
            ("taken", []),
            ("worker_state_written", []),
            ("finished", []),
            ("lost", ["broke"]),
            ("validated", [validation]),
        ]
        heard = []
        for event, arguments in said:
            run = started(2)
            before = run.members[0]
            run.come_back(0)
            # The successor takes the center; nothing may be committed meanwhile.
            decisions = run.tell(event, before, *arguments)
            receiving = set(run.coordinator.round.ranks.of(RankState.RECEIVING))
            run.take(0)
            if (decisions, receiving, replied_to(run.round())) != ([], {0}, [0, 1]):
                heard.append(event)
        assert not heard

    def test_nor_is_it_heard_of(self) -> None:
        run = started(2, deadline_s=10)
        before = run.members[0]
        run.join(0, attempt=1)
        run.wait(9)
        run.coordinator.heartbeat(before, run.now)
        run.coordinator.members.look(run.now + 1)
        assert run.coordinator.members.overdue({0}) == {0}

    @every("attempt", [-1, 0])
    def test_who_has_no_place_has_not_finished_for_who_has(self, attempt: int) -> None:
        run = started(2)
        stranger, holder = Member(0, "elsewhere", attempt), Member(0, "here", attempt + 1)
        run.tell("joined", stranger)
        if attempt == 0:
            run.tell("joined", holder)
        assert stranger.gone
        assert run.tell("finished", stranger) == []


def test_who_was_dropped_with_its_last_word_on_the_way_has_finished() -> None:
    """It does not come back, so that the run would wait for it until the deadline."""
    run = started(2)
    run.round(last=True)
    run.lose(0)
    run.finish(0)
    assert run.finish(1)[-1] == do.end(None)


class TestMinWorkers:
    """Rounds wait until there are enough to go on."""

    def test_a_round_waits_for_min_workers(self) -> None:
        run = started(2, min_workers=2)
        run.lose(0)
        assert only(do.commit, run.contribute(1)) == []
        decisions = run.come_back(0)
        assert replied_to(decisions) == [1]
        assert decisions[-1] == do.welcome(run.members[0])
        assert run.positions() == [0, 1]

    def test_the_wait_ends_at_the_deadline(self) -> None:
        run = started(2, min_workers=2, deadline_s=10)
        run.lose(0)
        run.contribute(1)
        words = r"rank 0 on host-0 did not come back \(rank 0 on host-0 was killed; .* within 10 s"
        expect_failure(run, run.wait(10), DeadlineError, words)

    def test_it_says_why_each_was_lost_that_is_waited_for(self) -> None:
        run = started(13, min_workers=12, deadline_s=10)
        for rank in (1, 12):
            run.tell("lost", run.members[rank], f"fell {rank}")
        for rank in {*run.ranks} - {1, 12}:
            run.contribute(rank)
        words = r"^rank 1 .*, rank 12 .*\(rank 1 on host-1 fell 1; rank 12 on host-12 fell 12; "
        expect_failure(run, run.wait(10), DeadlineError, words)


class TestFinishing:
    """Who is lost when others have left already."""

    def test_the_wait_for_it_ends_at_the_deadline(self) -> None:
        run = started(3, deadline_s=10)
        run.round(last=True)
        run.finish(0)
        run.lose(2)
        run.finish(1)
        assert only(do.end, run.wait(9)) == []
        words = r"^rank 2 on host-2 did not come back \(rank 2 on host-2 was killed; .* within 10 s"
        expect_failure(run, run.wait(1), DeadlineError, words)

    def test_it_comes_back_to_say_that_it_has_finished_too(self) -> None:
        run = started(2)
        run.round(last=True)
        run.finish(0)
        run.lose(1)
        assert run.come_back(1) == [do.welcome(run.members[1])]
        run.take(1)
        assert run.finish(1) == [do.dismiss(run.members[1]), do.end(None)]


class TestTooMany:
    """How many losses a run survives."""

    def test_one_loss_too_many_ends_the_run(self) -> None:
        run = started(3, max_failures=1)
        assert only(do.end, run.lose(0)) == []
        words = "rank 0 on host-0 was killed; rank 1 on host-1 was killed"
        expect_failure(run, run.lose(1), WorkerLostError, words)
        assert run.contribute(2) == []

    @staticmethod
    def join_and_lose(run: Run, rank: int, *, task: int, attempt: int = 0) -> list[Told]:
        run.join(rank, attempt, task=task)
        return only(do.end, run.lose(rank))

    def test_workers_that_are_lost_with_their_task_are_one_loss(self) -> None:
        run = Run(4, max_failures=2)
        for attempt in (5, 9):
            for rank in (0, 1, 2):
                assert self.join_and_lose(run, rank, task=0, attempt=attempt) == []
        words = r"7 workers were lost, more than maxFailures allows \(2\): "
        expect_failure(run, self.join_and_lose(run, 3, task=1), WorkerLostError, words)

    def test_a_worker_that_is_lost_twice_in_one_attempt_is_two_losses(self) -> None:
        run = Run(2, max_failures=1)
        assert self.join_and_lose(run, 0, task=0) == []
        assert self.join_and_lose(run, 0, task=0) != []


class TestDropping:
    """Who is silent for longer than its windows explain is dropped, and may come back."""

    def window(self, run: Run, seconds: float) -> None:
        """A round of windows that take so long; workers send something as they end."""
        run.wait(seconds)
        for rank in run.members:
            # The loop notes a heartbeat as the window's header arrives.
            run.coordinator.heartbeat(run.members[rank], run.now)
            run.contribute(rank)
        run.take()
        run.tell("tick")

    def test_a_silent_rank_is_dropped_once_windows_were_measured(self) -> None:
        run = started(2)
        self.window(run, 1.0)
        run.contribute(1)
        assert only(do.drop, run.wait(STRAGGLER_S - 1)) == []
        decisions = run.wait(1)
        assert decisions[:3] == [do.drop(run.members[0]), do.skip(0), commit(run, 1)]
        (loss,) = run.coordinator.members.losses
        assert loss == "rank 0 on host-0 did not contribute to round 2 (epoch 1) within 15.0 s"
        assert run.coordinator.members.dropped == [0]

    def test_nobody_is_dropped_before_windows_were_measured(self) -> None:
        run = started(2)
        run.contribute(1)
        assert only(do.drop, run.wait(59)) == []

    @every_row((5.0, 5.0 * STRAGGLER_WINDOWS), (20.0, 60.0))
    def test_windows_that_take_long_are_granted_more(
        self, longest_s: float, granted_s: float
    ) -> None:
        run = started(2)
        self.window(run, longest_s)
        self.window(run, 1.0)
        run.contribute(1)
        assert only(do.drop, run.wait(granted_s - 1)) == []
        assert only(do.drop, run.wait(1)) == [do.drop(run.members[0])]

    @every("max_failures", [0, 5])
    def test_who_cannot_be_dropped_has_the_whole_deadline(self, max_failures: int) -> None:
        """In a run that survives no loss nobody can be, and nobody who is lost already."""
        run = started(2, max_failures=max_failures, min_workers=2)
        self.window(run, 1.0)
        if max_failures:
            run.lose(0)
        run.contribute(1)
        assert only(do.end, run.wait(59)) == []
        expect_failure(run, run.wait(1), DeadlineError, "^rank 0 on host-0 did not ")

    def test_a_wait_for_others_is_no_part_of_a_window(self) -> None:
        run = started(3)
        run.now += 1
        run.close(0)
        run.close(1)
        run.now += 20
        run.lose(1)
        run.wait(10)
        run.close(0)
        assert run.coordinator.members.patience_s(0) == STRAGGLER_S

    @every_row((60.0, 2 * STRAGGLER_S), (20.0, 20.0))
    def test_what_is_granted_doubles_with_each_drop(
        self, deadline_s: float, granted_s: float
    ) -> None:
        run = started(3, deadline_s=deadline_s)
        self.window(run, 1.0)
        run.contribute(1)
        run.contribute(2)
        run.wait(STRAGGLER_S)
        run.take(1, 2)
        run.contribute(1)
        assert only(do.drop, run.wait(granted_s - 1)) == []
        assert only(do.drop, run.wait(1)) == [do.drop(run.members[2])]

    def test_whoever_waits_is_not_dropped_for_one_that_is(self) -> None:
        run = started(3)
        self.window(run, 1.0)
        run.close(1)
        run.wait(1)
        run.close(0)
        run.close(2)
        decisions = run.wait(STRAGGLER_S)
        assert only(do.drop, decisions) == [do.drop(run.members[0])]
        assert only(do.start_over, decisions) == [do.start_over((run.members[1], run.members[2]))]
