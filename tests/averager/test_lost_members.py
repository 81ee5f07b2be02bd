"""Rounds whose members are lost: what is committed without them, and how they come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_rounds import LAYOUT, contribute, member, ready, report, shard, start_all, together
from torch import Tensor

from sparkdl.averager import members
from sparkdl.averager.codec import FullPrecision
from sparkdl.averager.members import FencedError, Member, Members, Tolerance
from sparkdl.averager.progress import Position
from sparkdl.averager.rounds import Rounds, StartOverError
from sparkdl.errors import DataError, DeadlineError, StoppedError, WorkerLostError


def make_rounds(
    world_size: int, *, max_failures: int = 5, min_workers: int = 1, deadline_s: float = 10.0
) -> Rounds:
    rounds = Rounds(
        LAYOUT,
        [torch.zeros(2)],
        world_size,
        FullPrecision(),
        deadline_s,
        tolerance=Tolerance(max_failures, min_workers),
    )
    start_all(rounds)
    return rounds


def lose(rounds: Rounds, rank: int) -> None:
    rounds.lose(member(rounds, rank), "was killed")


def come_back(rounds: Rounds, rank: int, attempt: int = 1) -> Position:
    """Join again, read the rows, take the center."""
    rounds.join(rank, "elsewhere", attempt)
    ready(rounds, rank)
    rounds.release(member(rounds, rank))
    return rounds.position(rank)


def eventually(question: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not question() and time.monotonic() < deadline:
        time.sleep(0.005)
    return question()


def test_a_round_is_committed_without_a_rank_that_is_lost_before_it_contributes() -> None:
    rounds = make_rounds(3)

    def lose_the_last() -> None:
        assert eventually(lambda: len(rounds._complete) == 2)
        lose(rounds, 2)

    first, second, _ = together(
        lambda: contribute(rounds, report(0), 1.0),
        lambda: contribute(rounds, report(1), 3.0),
        lose_the_last,
    )
    assert first.result() == second.result() == [2.0, 2.0]


def test_a_lost_first_rank_lets_the_others_take_their_turn() -> None:
    rounds = make_rounds(3)

    def lose_the_first() -> None:
        assert eventually(lambda: len(rounds._arrived) == 2)
        lose(rounds, 0)

    first, second, _ = together(
        lambda: contribute(rounds, report(1), 1.0),
        lambda: contribute(rounds, report(2), 3.0),
        lose_the_first,
    )
    assert first.result() == second.result() == [2.0, 2.0]


def test_half_a_contribution_makes_the_others_start_over() -> None:
    rounds = make_rounds(2)
    halfway, killed = threading.Event(), threading.Event()

    def half(into: Tensor) -> None:
        into.fill_(100.0)
        halfway.set()
        assert killed.wait(10)
        raise ConnectionError

    def contribute_half() -> None:
        try:
            scratch = torch.empty(rounds.chunk_bytes, dtype=torch.uint8)
            rounds.contribute(member(rounds, 0), report(0), half, scratch)
        except ConnectionError:
            lose(rounds, 0)

    def contribute_twice() -> list[float]:
        assert halfway.wait(10)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(contribute, rounds, report(1), 3.0)
            assert eventually(lambda: 1 in rounds._arrived)
            killed.set()
            with pytest.raises(StartOverError):
                first.result(10)
        return contribute(rounds, report(1), 3.0)

    _, second = together(contribute_half, contribute_twice)
    assert second.result() == [3.0, 3.0]
    assert rounds.position(0).step == 0
    assert rounds.position(1).step == 1


def test_a_whole_contribution_counts_although_its_sender_is_lost() -> None:
    rounds = make_rounds(2)

    def contribute_and_be_lost() -> None:
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(contribute, rounds, report(0), 1.0)
            assert eventually(lambda: 0 in rounds._complete)
            lose(rounds, 0)
            with pytest.raises(FencedError):
                lost.result(10)
        assert contribute(rounds, report(1), 3.0) == [2.0, 2.0]

    together(contribute_and_be_lost)[0].result()
    assert [rounds.position(rank).step for rank in range(2)] == [1, 1]


def test_who_comes_back_takes_part_again_behind_its_last_commit() -> None:
    rounds = make_rounds(2)
    together(lambda: contribute(rounds, report(0), 1.0), lambda: contribute(rounds, report(1), 1.0))
    lose(rounds, 0)
    assert contribute(rounds, report(1), 7.0) == [7.0, 7.0]
    assert come_back(rounds, 0).step == 1
    first, second = together(
        lambda: contribute(rounds, report(0), 2.0), lambda: contribute(rounds, report(1), 4.0)
    )
    assert first.result() == second.result() == [3.0, 3.0]


def test_who_comes_back_in_the_middle_of_a_round_is_let_in_at_its_end() -> None:
    rounds = make_rounds(3)
    lose(rounds, 0)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(contribute, rounds, report(1), 1.0)
        assert eventually(lambda: 1 in rounds._complete)
        back = pool.submit(come_back, rounds, 0)
        assert eventually(lambda: bool(rounds._knocking))
        assert not back.done()
        assert contribute(rounds, report(2), 3.0) == [2.0, 2.0]
        assert waiting.result(10) == [2.0, 2.0]
        back.result(10)
    assert rounds._admitted == {0, 1, 2}


def test_an_epoch_does_not_end_before_a_lost_rank_is_through_with_it() -> None:
    rounds = make_rounds(2)
    lose(rounds, 0)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(contribute, rounds, report(1, last=True), 1.0)
        assert eventually(lambda: rounds._tally.round == 1)
        assert not early.done()
        come_back(rounds, 0)
        assert contribute(rounds, report(0, last=True), 5.0) == [5.0, 5.0]
        assert early.result(10) == [5.0, 5.0]
    assert [row.examples for row in rounds.history] == [2]


def test_a_rank_that_was_through_with_its_epoch_may_come_back_in_it() -> None:
    rounds = make_rounds(2)
    with ThreadPoolExecutor(2) as pool:
        through = pool.submit(contribute, rounds, report(0, last=True), 1.0)
        assert contribute(rounds, report(1), 1.0) == [1.0, 1.0]
        lose(rounds, 0)
        with pytest.raises(FencedError):
            through.result(10)
        come_back(rounds, 0)
        again = pool.submit(contribute, rounds, report(0, last=True, examples=0), 9.0)
        assert contribute(rounds, report(1, last=True), 3.0) == [3.0, 3.0]
        assert again.result(10) == [3.0, 3.0]
    assert [row.examples for row in rounds.history] == [3]


def test_an_earlier_attempt_is_fenced_off_and_a_later_takes_its_place() -> None:
    rounds = make_rounds(2)
    interrupted = threading.Event()
    rounds.join(0, "b", 5, interrupt=interrupted.set)
    with pytest.raises(FencedError, match="attempt 4 of rank 0 on a is out of date: attempt 5"):
        rounds.join(0, "a", 4)
    assert not interrupted.is_set()
    rounds.join(0, "c", 6)
    assert interrupted.is_set()
    assert "was replaced" in rounds.losses[-1]


NOTHING = torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize(
    "call",
    [
        lambda rounds, worker: rounds.still_reading(worker),
        lambda rounds, worker: rounds.ready(worker, shard(), lambda: None),
        lambda rounds, worker: rounds.show(worker, shard(), lambda: None),
        lambda rounds, worker: rounds.gather(worker, "", lambda: None),
        lambda rounds, worker: rounds.contribute(worker, report(0), Tensor.zero_, NOTHING),
        lambda rounds, worker: rounds.release(worker),
    ],
    ids=["still_reading", "ready", "show", "gather", "contribute", "release"],
)
def test_whose_place_was_taken_can_do_nothing_in_its_successors_name(
    call: Callable[[Rounds, Member], object],
) -> None:
    """Its connection broke, but its thread had still received what it had sent before."""
    rounds = make_rounds(2)
    before = member(rounds, 0)
    rounds.join(0, "elsewhere", 1)
    ready(rounds, 0)  # the successor takes the center; nothing may be committed meanwhile
    with pytest.raises(FencedError, match="rank 0 on host-0 has lost its place"):
        call(rounds, before)
    assert rounds.failure is None
    assert rounds._readers == {0}

    rounds.release(member(rounds, 0))
    replies = together(
        lambda: contribute(rounds, report(0), 1.0), lambda: contribute(rounds, report(1), 3.0)
    )
    assert [reply.result() for reply in replies] == [[2.0, 2.0]] * 2


def test_who_was_dropped_with_its_last_word_on_the_way_has_finished() -> None:
    """It does not come back, so that the run would wait for it until the deadline."""
    rounds = make_rounds(2)
    together(
        lambda: contribute(rounds, report(0, last=True), 1.0),
        lambda: contribute(rounds, report(1, last=True), 1.0),
    )
    dropped = member(rounds, 0)
    lose(rounds, 0)
    rounds.finish(dropped)
    rounds.finish(member(rounds, 1))
    events = [rounds.events.get(timeout=10) for _ in range(rounds.events.qsize())]
    assert events[-1] is None
    assert rounds.failure is None


def test_rounds_wait_for_min_workers() -> None:
    rounds = make_rounds(2, min_workers=2)
    lose(rounds, 0)
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(contribute, rounds, report(1), 1.0)
        assert eventually(lambda: 1 in rounds._complete)
        assert not held.done()
        assert rounds._tally.round == 0
        back = pool.submit(come_back, rounds, 0)
        assert held.result(10) == [1.0, 1.0]
        back.result(10)


def test_waiting_for_min_workers_ends_at_the_deadline() -> None:
    rounds = make_rounds(2, min_workers=2, deadline_s=0.4)
    lose(rounds, 0)
    with pytest.raises(DeadlineError, match=r"rank 0 on host-0 did not come back \(rank 0 on"):
        contribute(rounds, report(1), 1.0)


def test_other_rows_than_before_are_refused() -> None:
    rounds = make_rounds(2)
    lose(rounds, 0)
    rounds.join(0, "elsewhere", 1)
    with pytest.raises(DataError, match=r"read other rows than before \(7 rows now, 1 then\)"):
        rounds.ready(member(rounds, 0), shard(7), lambda: None)


def test_one_loss_too_many_ends_the_run() -> None:
    rounds = make_rounds(3, max_failures=1)
    lose(rounds, 0)
    assert rounds.failure is None
    lose(rounds, 1)
    assert isinstance(rounds.failure, WorkerLostError)
    assert "rank 0 on host-0 was killed; rank 1 on host-1 was killed" in str(rounds.failure)
    with pytest.raises(StoppedError):
        contribute(rounds, report(2), 1.0)


def test_a_silent_rank_is_dropped_once_windows_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "STRAGGLER_S", 0.2)
    rounds = make_rounds(2)
    together(lambda: contribute(rounds, report(0), 1.0), lambda: contribute(rounds, report(1), 1.0))

    def look() -> None:
        while not rounds.losses:
            rounds.check_deadline()
            time.sleep(0.02)

    alone, _ = together(lambda: contribute(rounds, report(1), 4.0), look)
    assert alone.result() == [4.0, 4.0]
    assert "rank 0 on host-0 did not contribute to round 2 (epoch 1) within" in rounds.losses[0]


def test_workers_that_are_lost_with_their_task_are_one_loss() -> None:
    crew = Members(6, 60.0, Tolerance(max_failures=2))

    def lose(rank: int, task: int, attempt: int) -> WorkerLostError | None:
        member = Member(rank, "a", attempt, lambda: None, task)
        crew.join(member)
        return crew.lose(member, "was killed")

    assert [lose(rank, 0, 5) for rank in (0, 1, 2)] == [None] * 3
    assert [lose(rank, 0, 9) for rank in (0, 1, 2)] == [None] * 3  # its next attempt
    with pytest.raises(WorkerLostError, match="more than maxFailures allows"):
        raise lose(3, 1, 6) or AssertionError("nobody counted")


def test_a_worker_that_is_lost_twice_in_one_attempt_is_two_losses() -> None:
    crew = Members(2, 60.0, Tolerance(max_failures=1))
    member = Member(0, "a", 5, lambda: None, 0)
    crew.join(member)
    assert crew.lose(member, "was cut off") is None
    assert crew.lose(member, "was cut off") is not None


def test_patience_grows_with_the_windows_and_stays_below_the_deadline() -> None:
    crew = Members(2, 60.0, Tolerance(max_failures=3))
    crew.join(Member(0, "a", 0, lambda: None, 0))
    assert crew.patience_s(0) == 60.0  # nothing measured yet
    crew._longest_window = 1.0
    assert crew.patience_s(0) == members.STRAGGLER_S
    crew._longest_window = 8.0
    assert crew.patience_s(0) == 8.0 * members.STRAGGLER_WINDOWS
    crew.double_patience()
    crew._longest_window = 1.0
    assert crew.patience_s(0) == 2 * members.STRAGGLER_S
    crew._longest_window = 100.0
    assert crew.patience_s(0) == 60.0
    assert crew.patience_s(1) == 60.0  # not there, so it cannot be dropped
