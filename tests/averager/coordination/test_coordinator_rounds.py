"""Rounds: who takes part, what is replied, who is named when somebody is missing."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from decided import Told, do
from decisions import Run, commit, expect_failure, only, report, started
from every_row import every, every_row

from sparkdl.errors import DeadlineError, TrainingError


def plain_reply(run: Run, rank: int) -> do.reply:
    return do.reply(run.members[rank], final=False, values=True, worker_state=False)


def final_reply(run: Run, rank: int) -> do.reply:
    return do.reply(run.members[rank], final=True, values=True, worker_state=False)


def test_a_round_is_committed_when_everyone_has_contributed() -> None:
    run = started(2)
    run.contribute(1, examples=1)
    run.close(0, examples=3)
    assert run.add(0) == [
        commit(run, 3, 1),
        do.report(report(0, examples=3)),
        do.report(report(1, examples=1)),
        plain_reply(run, 0),
        plain_reply(run, 1),
    ]


def test_who_does_not_want_the_values_is_told_that_they_are_committed() -> None:
    run = started(1)
    replies = only(do.reply, run.close(0, takes_reply=False) + run.add(0))
    assert replies == [do.reply(run.members[0], final=False, values=False, worker_state=False)]


def test_a_rank_whose_epoch_is_over_gets_the_epochs_last_center() -> None:
    run = started(2)
    run.contribute(0, last=True)
    assert only(do.reply, run.contribute(1)) == [plain_reply(run, 1)]
    run.take(1)
    assert run.close(1) == [do.open_sum((1,)), do.receive(run.members[1], 1)]
    assert only(do.reply, run.add(1)) == [plain_reply(run, 1)]
    run.take(1)
    last = only(do.reply, run.contribute(1, last=True))
    assert last == [final_reply(run, 0), final_reply(run, 1)]


def test_nobody_adds_to_the_next_sum_before_all_have_taken_the_reply() -> None:
    run = started(3)
    for rank in run.ranks:
        run.contribute(rank)
    run.take(0)
    assert run.close(0) == []
    run.take(2)
    assert run.close(2) == []
    assert run.take(1) == [
        do.open_sum((0, 1, 2)),
        do.receive(run.members[0], 1),
        do.receive(run.members[2], 1),
    ]


def gather(run: Run, rank: int, value: object = "here") -> list[Told]:
    return run.tell("gave", run.members[rank], value)


def while_another_waits(run: Run) -> list[Told]:
    for rank in run.ranks:
        run.contribute(rank)
    run.take(0)
    return run.close(0) + run.close(0)


def behind_the_last_of_the_epoch(run: Run) -> list[Told]:
    run.contribute(0, last=True)
    run.contribute(1)
    run.take(1)
    return run.close(0)


def in_the_next_epoch(run: Run) -> list[Told]:
    run.contribute(0, last=True)
    run.contribute(1)
    run.take(1)
    return run.close(1, epoch=2)


def in_the_epoch_before(run: Run) -> list[Told]:
    run.round(last=True)
    run.close(0, epoch=2)
    return run.close(1, last=True)


def after_another_has_left(run: Run) -> list[Told]:
    run.round(last=True)
    assert run.finish(0) == [do.dismiss(run.members[0])]
    return run.close(1, epoch=2)


def after_a_window_that_was_not_the_last(run: Run) -> list[Told]:
    run.contribute(1, last=True)
    run.contribute(0)
    run.take(0)
    return run.finish(0)


LEFT = "rank 0 on host-0 left the run before the end of epoch 1. .*last=True"


@every_row(
    (
        lambda run: run.contribute(0) + run.close(0),
        "rank 0 contributed a window out of order in epoch 1, step 1",
    ),
    (while_another_waits, "rank 0 on host-0 closed a window twice"),
    (behind_the_last_of_the_epoch, "rank 0 contributed a window out of order"),
    (in_the_next_epoch, "rank 1 on host-1 .*window of epoch 2, but the run is in epoch 1"),
    (in_the_epoch_before, "rank 1 on host-1 .*window of epoch 1, but the run is in epoch 2"),
    (
        after_another_has_left,
        "rank 1 on host-1 contributed a window of epoch 2, but rank 0 on host-0 had already "
        "left the run: all workers must train the same number of epochs",
    ),
    (lambda run: run.round(step=7) + run.finish(0), LEFT),
    (lambda run: run.close(1) + run.finish(0), LEFT),
    (lambda run: run.contribute(1) + run.finish(0), LEFT),
    (lambda run: run.contribute(1, last=True) + run.finish(0), LEFT),
    (after_a_window_that_was_not_the_last, LEFT),
    (
        lambda run: gather(run, 1) + run.finish(0),
        "rank 0 on host-0 left the run .*exchange among the workers",
    ),
    (
        lambda run: run.finish(0) + gather(run, 1),
        "rank 1 on host-1 .*exchange.*, .*rank 0 on host-0 .*left the run",
    ),
    (
        lambda run: gather(run, 0) + gather(run, 0),
        "rank 0 on host-0 contributed twice to a gather before all others had contributed once",
    ),
)
def test_what_no_worker_of_ours_does_ends_the_run_and_says_who_did_it(
    act: Callable[[Run], list[Told]], words: str
) -> None:
    run = started(2)
    expect_failure(run, act(run), TrainingError, words)


class TestSilence:
    """Who is named when a round does not end, and who is not."""

    def test_a_silent_rank_is_named_with_its_host_the_round_and_the_epoch(self) -> None:
        run = started(2, deadline_s=10)
        run.wait(1)
        run.contribute(0)
        words = r"^rank 1 on host-1 did not contribute to round 1 \(epoch 1\) within 10 s"
        expect_failure(run, run.wait(10), DeadlineError, words)

    def test_who_is_done_waits_as_long_as_the_others_make_progress(self) -> None:
        run = started(2, deadline_s=10)
        run.contribute(0, last=True)
        for number in range(8):
            assert only(do.end, run.wait(9)) == []
            run.contribute(1, last=number == 7)
            run.take(1)
        assert run.failure is None

    def test_who_waits_for_its_turn_is_not_blamed_for_the_one_before_it(self) -> None:
        run = started(3, deadline_s=10)
        run.close(1)
        run.close(2)
        run.wait(5)
        run.close(0)
        assert only(do.end, run.wait(9)) == []
        words = r"^rank 0 on host-0 did not contribute to round 1"
        expect_failure(run, run.wait(1), DeadlineError, words)

    def test_who_does_not_take_the_reply_is_named(self) -> None:
        run = started(2, deadline_s=10)
        for rank in run.ranks:
            run.contribute(rank)
        run.take(0)
        run.close(0)
        words = "^rank 1 on host-1 did not take the center of round 1 within 10 s"
        expect_failure(run, run.wait(10), DeadlineError, words)

    @every_row((10, 3600, 1), (2, 3, 0.5))
    def test_a_pause_of_the_driver_judges_nobody(
        self, deadline_s: float, pause_s: float, tick_s: float
    ) -> None:
        run = started(2, deadline_s=deadline_s)
        run.contribute(0)
        run.now += pause_s
        assert only(do.end, run.tell("tick")) == []
        assert only(do.end, run.wait(deadline_s - tick_s)) == []
        words = "^rank 1 on host-1 did not contribute"
        expect_failure(run, run.wait(tick_s), DeadlineError, words)

    @every("trains", [0, 1])
    def test_while_one_trains_the_others_are_told_that_the_run_goes_on(self, trains: int) -> None:
        """Also those whose turn to add has not come, for a lower rank has not contributed."""
        run = started(3, deadline_s=8)
        others = [rank for rank in range(3) if rank != trains]
        for rank in others:
            run.close(rank)
        if trains:
            run.add(0)
        for _ in range(10):
            run.coordinator.heartbeat(run.members[trains], run.now)
            (told,) = only(do.say_waiting, run.wait(2))
            assert set(told.members) == {run.members[rank] for rank in others}


class TestGather:
    """What the workers tell each other by way of the driver."""

    def test_everyone_is_told_all_values_by_rank_as_often_as_all_give(self) -> None:
        run = started(3)
        for letter in "ab":
            assert gather(run, 2, f"{letter}2") == gather(run, 0, f"{letter}0") == []
            members = (run.members[2], run.members[0], run.members[1])
            told = do.send_gathered(members, (f"{letter}0", f"{letter}1", f"{letter}2"))
            assert gather(run, 1, f"{letter}1") == [told]

    def test_all_are_asked_for_a_commit_at_once_and_only_until_there_is_one(self) -> None:
        run = started(2)
        gather(run, 0, "a")
        assert run.tell("want_commit") == []  # who gave before waits for the same answer
        for letter in "ab":
            if letter == "b":
                gather(run, 0, "b")
            told = do.send_gathered((run.members[0], run.members[1]), (letter, letter), commit=True)
            assert gather(run, 1, letter) == [told]
        run.round()
        gather(run, 0, "c")
        (told,) = only(do.send_gathered, gather(run, 1, "c"))
        assert not told.commit

    def test_a_rank_that_stays_away_is_named(self) -> None:
        run = started(2, deadline_s=10)
        gather(run, 0, "here")
        words = "^rank 1 on host-1 did not take part in an exchange among the workers within 10 s"
        expect_failure(run, run.wait(10), DeadlineError, words)

    def test_who_gave_was_lost_and_is_back_gives_once_more(self) -> None:
        run = started(2, max_failures=1)
        gather(run, 0, "before")
        run.lose(0)
        assert gather(run, 1, "other") == []
        run.come_back(0)
        run.take(0)
        told = do.send_gathered((run.members[1], run.members[0]), ("after", "other"))
        assert gather(run, 0, "after") == [told]
        assert gather(run, 1, "next") == []
        assert only(do.send_gathered, gather(run, 0, "next")) != []


def typical_instructions(world_size: int, rounds: int) -> dict[str, float]:
    """How many of Python's instructions the events of a round typically take, by kind.

    Instructions, because they are the same on a busy machine. A scan in C is one of them:
    `benchmarks/rounds.py scale` measures what those cost.
    """
    run = started(world_size)
    instructions: dict[str, list[int]] = {}
    executed = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal executed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += event == "opcode"
        return count

    def measure(event: Any, arguments: Iterator[Any]) -> None:
        for each in arguments:
            before, tracing = executed, sys.gettrace()
            sys.settrace(count)
            try:
                event(run.now, *each)
            finally:
                sys.settrace(tracing)
            instructions.setdefault(event.__name__, []).append(executed - before)

    for _ in range(rounds):
        members = run.members.values()
        measure(run.coordinator.window_closed, ((each, report(each.rank)) for each in members))
        measure(run.coordinator.contributed, ((each,) for each in members))
        measure(run.coordinator.taken, ((each,) for each in members))
    return {kind: statistics.median(counts) for kind, counts in instructions.items()}


def test_what_an_event_costs_does_not_depend_on_the_number_of_workers() -> None:
    """But for the first and the last of a round, which the median leaves out."""
    few, many = typical_instructions(100, 3), typical_instructions(3_000, 1)
    assert few.keys() == {"window_closed", "contributed", "taken"}
    assert min(few.values()) > 10
    assert all(many[kind] < 1.1 * few[kind] for kind in few), (few, many)
