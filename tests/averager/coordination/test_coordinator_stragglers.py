"""Stragglers are dropped, when others have waited long enough for them."""

from __future__ import annotations

from decided import do
from decisions import Run, commit, expect_failure, only
from decisions import started as started_with
from every_row import every

from sparkdl.averager.coordination.membership import STRAGGLER_S, STRAGGLER_WINDOWS
from sparkdl.errors import DeadlineError


def started(world_size: int, *, max_failures: int = 5, **options: object) -> Run:
    return started_with(world_size, max_failures=max_failures, **options)


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

    @every(("longest_s", "granted_s"), [(5.0, 5.0 * STRAGGLER_WINDOWS), (20.0, 60.0)])
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

    @every(("deadline_s", "granted_s"), [(60.0, 2 * STRAGGLER_S), (20.0, 20.0)])
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
