"""What an epoch adds up to, and what part of a full round a round is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from decided import Told, do
from decisions import Run, expect_failure, only, started
from every_row import every
from summed import sums_of

from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.coordination.round import FullRound
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.run_events import (
    EpochCounted,
    EpochValidated,
    Position,
    Progress,
    WorkerState,
)
from sparkdl.errors import DeadlineError, TrainingError
from sparkdl.events import EpochSummary, ValidationReport, WindowReport
from sparkdl.feed.shards import ShardStatistics

HELD_OUT = ShardStatistics(1, (), held_out=1)


def with_held_out_rows(run: Run, found: ShardStatistics | None = HELD_OUT) -> Run:
    for rank in run.ranks:
        run.join(rank)
    for rank in run.ranks:
        run.read(rank, found)
    run.start()
    run.take()
    return run


def validate(run: Run, rank: int, loss: float, epoch: int = 1) -> list[Told]:
    report = ValidationReport(rank=rank, epoch=epoch, examples=1, loss_sum=loss, weight=1.0)
    return run.tell("validated", run.members[rank], report)


def ask(run: Run, rank: int, epochs: int = 1, known: int = 0) -> list[Told]:
    return run.tell("epoch_losses_wanted", run.members[rank], known, epochs)


def told(decisions: list[Told]) -> dict[int, tuple[float, ...]]:
    return {each.member.rank: each.losses for each in only(do.send_epoch_losses, decisions)}


def test_who_comes_back_during_the_next_epoch_is_told_at_once() -> None:
    run = with_held_out_rows(Run(2, max_failures=1))
    run.round(last=True)
    for rank in run.ranks:
        validate(run, rank, 2.0)
    run.contribute(0, epoch=2, step=2)
    run.lose(1)
    run.join(1, 1, "elsewhere")
    run.read(1, HELD_OUT)
    assert told(ask(run, 1)) == {1: (2.0,)}


def test_who_was_lost_before_it_had_validated_is_waited_for() -> None:
    run = with_held_out_rows(Run(2, max_failures=1))
    run.round(last=True)
    validate(run, 0, 2.0)
    ask(run, 0)
    assert not told(run.lose(1))
    run.join(1, 1, "elsewhere")
    assert only(do.welcome, run.read(1, HELD_OUT))
    assert told(validate(run, 1, 4.0)) == {0: (3.0,)}


def test_after_a_resume_at_the_end_of_an_epoch_all_validate_again() -> None:
    before = EpochSummary(epoch=1, loss=9.0, examples=2, rounds=1, seconds=1.0, validation_loss=7.0)
    progress = Progress(
        epoch=2, rounds=0, positions=(Position(epoch=2, step=1),) * 2, history=(before,)
    )
    run = with_held_out_rows(Run(2, progress=progress))
    validate(run, 0, 2.0)
    assert not told(ask(run, 0))  # 7.0 may be what some had found
    assert told(validate(run, 1, 4.0)) == {0: (3.0,)}


def test_an_epoch_that_was_interrupted_has_the_seconds_of_all_its_rounds() -> None:
    first = started(2)
    first.wait(40.0)
    first.round()
    first.wait(7.0)  # of a window that is lost
    told = Progress.from_json(first.coordinator.committed.progress().as_json())
    second = Run(2, progress=told)
    second.wait(20.0)  # until all have read their rows
    with_held_out_rows(second, None)
    for epoch in (1, 2):
        second.wait(5.0)
        second.round(epoch=epoch, step=1 + epoch, last=True)
    seconds = [each.seconds for each in second.coordinator.committed.history]
    assert seconds == pytest.approx([45.0, 5.0])


def test_who_does_not_validate_is_named() -> None:
    run = with_held_out_rows(Run(3, deadline_s=10.0))
    run.round(last=True)
    validate(run, 0, 2.0)
    ask(run, 0)
    validate(run, 2, 2.0)
    ask(run, 2)
    decisions = run.wait(30.0)
    assert only(do.say_waiting, decisions)
    expect_failure(
        run, decisions, DeadlineError, "rank 1 .*did not report the loss on its held-out rows"
    )


@every("held_out", [True, False])
def test_nobody_is_overdue_while_the_driver_takes_its_time_with_an_epoch(held_out: bool) -> None:
    run = Run(2, deadline_s=10.0)
    run.coordinator = Coordinator(replace(run.coordinator.spec, followed=True), run.now)
    with_held_out_rows(run, HELD_OUT if held_out else None)
    run.round(last=True)
    for rank in run.ranks if held_out else ():
        validate(run, rank, 2.0)
    assert not told(ask(run, 0))
    assert only(do.say_waiting, run.wait(300.0))  # a callback that evaluates much, or a dead server
    assert run.failure is None
    assert list(told(run.tell("approve_epoch", 1))) == [0]
    run.wait(9.0)
    assert run.failure is None
    expect_failure(run, run.wait(2.0), DeadlineError, "did not contribute to round 2")


def test_who_waits_for_an_epoch_that_has_not_ended_is_refused() -> None:
    run = started(2)
    expect_failure(
        run, ask(run, 0), TrainingError, "asked for the losses of 1 epochs, but only 0 have ended"
    )


def measuring(max_failures: int = 0, metric: str | None = None) -> Run:
    run = Run(2)
    spec = RunSpec(
        world_size=2,
        deadline_s=60.0,
        tolerance=Tolerance(max_failures, 1),
        followed=True,
        measures=True,
        metric=metric,
    )
    run.coordinator = Coordinator(spec, run.now)
    return with_held_out_rows(run)


def count(run: Run, rank: int, epoch: int = 1) -> list[Told]:
    report = ValidationReport(rank=rank, epoch=epoch, examples=1, loss_sum=2.0, weight=1.0)
    states = WorkerState()
    states.add(f"{rank} in {epoch}".encode())
    return run.tell("validated", run.members[rank], report, states)


def counted(decisions: list[Told]) -> list[Any]:
    events = [each.event for each in only(do.report, decisions)]
    return [
        (each.epoch, [s and b"".join(s.blocks(99)).decode() for s in each.states])
        for each in events
        if isinstance(each, EpochCounted)
    ]


def validated(decisions: list[Told]) -> list[Any]:
    events = [each.event for each in only(do.report, decisions)]
    return [each.summary.metrics for each in events if isinstance(each, EpochValidated)]


def test_the_driver_is_given_what_all_have_counted_by_rank_and_callbacks_what_it_answers() -> None:
    run = measuring(metric="auroc")
    run.round(last=True)
    assert counted(count(run, 1)) == []
    ask(run, 1)
    decisions = count(run, 0)
    assert counted(decisions) == [(1, ["0 in 1", "1 in 1"])]
    assert validated(decisions) == []
    assert told(decisions) == {}
    decisions = run.tell("measured", 1, {"auroc": 0.75})
    assert validated(decisions) == [{"auroc": 0.75}]
    assert told(decisions) == {}
    # What follows a metric is told that, not the loss.
    assert told(run.tell("approve_epoch", 1)) == {1: (0.75,)}


def test_who_was_lost_before_it_had_counted_is_waited_for_and_counts_once() -> None:
    run = measuring(max_failures=2)
    run.round(last=True)
    count(run, 0)
    ask(run, 0)
    assert counted(run.lose(0)) == []
    run.join(0, 1, "elsewhere")
    run.read(0, HELD_OUT)
    run.take(0)
    count(run, 0)
    assert counted(count(run, 1)) == [(1, ["0 in 1", "1 in 1"])]
    # Again while the driver computes: it is told nothing new.
    assert counted(count(run, 1)) == []
    run.tell("measured", 1, {})
    run.tell("approve_epoch", 1)
    run.round(last=True, epoch=2, step=2)
    count(run, 0, epoch=2)
    assert counted(count(run, 1, epoch=2)) == [(2, ["0 in 2", "1 in 2"])]


WINDOW = 10


def windows_of(rank: int, rows: int, weight_of_a_row: int | None = None) -> list[WindowReport]:
    """A rank's windows of an epoch."""
    sizes = [min(WINDOW, rows - start) for start in range(0, rows, WINDOW)] or [0]
    return [
        WindowReport(
            rank=rank,
            epoch=1,
            step=number,
            examples=size,
            loss_sum=0.0,
            last=number == len(sizes),
            group_weight=None if weight_of_a_row is None else size * weight_of_a_row,
        )
        for number, size in enumerate(sizes, 1)
    ]


def in_step(rows: list[int]) -> list[list[WindowReport]]:
    """The rounds of an epoch of equally fast workers."""
    of_ranks = [windows_of(rank, each) for rank, each in enumerate(rows)]
    longest = max(map(len, of_ranks))
    return [[own[k] for own in of_ranks if k < len(own)] for k in range(longest)]


@every("rows", [[40], [40, 40], [40, 33, 21], [7, 3, 100], [0, 25, 5]])
def test_rounds_of_everyone_who_has_rows_left_are_full_ones_from_the_first_epoch_on(
    rows: list[int],
) -> None:
    full = FullRound(len(rows))
    for _ in range(3):
        assert [full.share(windows) for windows in in_step(rows)] == [1.0] * len(in_step(rows))
        full.end_epoch()


@every("rows", [[40, 40, 40, 40], [40, 33, 21], [7, 3, 100], [0, 25, 5]])
@every("seed", range(5))
def test_in_any_order_a_window_alone_has_the_share_that_it_has_among_everyones(
    rows: list[int], seed: int
) -> None:
    """From the second epoch on, when it is known how many rows each has."""
    full, draw = FullRound(len(rows)), random.Random(seed)
    expected = {
        (window.rank, window.step): window.examples / sum(each.examples for each in windows)
        for windows in in_step(rows)
        for window in windows
        if window.examples
    }
    for epoch in range(1, 4):
        left = [windows_of(rank, each) for rank, each in enumerate(rows)]
        while ranks := [rank for rank, own in enumerate(left) if own]:
            window = left[draw.choice(ranks)].pop(0)
            share = full.share([window])
            if window.examples and epoch > 1:
                assert share == pytest.approx(expected[window.rank, window.step])
        full.end_epoch()


def test_a_round_of_some_has_the_sum_of_their_shares_late_or_not() -> None:
    full = FullRound(4)
    early, late = windows_of(0, 40), windows_of(3, 40)
    assert full.share([early[0], windows_of(1, 40)[0], windows_of(2, 40)[0]]) == 3 / 4
    assert full.share([early[1], late[0]]) == 1 / 2
    assert full.share([late[1]]) == 1 / 4


def test_the_weights_that_contributions_carry_count_and_not_their_rows() -> None:
    """Rank 1's rows weigh three times as much; who is missing counts as the mean row so far."""
    full = FullRound(2)
    light, heavy = windows_of(0, 20, 1), windows_of(1, 20, 3)
    assert full.share([light[0], heavy[0]]) == 1.0
    assert full.share([heavy[1]]) == pytest.approx(30 / (30 + 10 * (10 + 30 + 30) / 30))


def test_it_goes_on_with_the_windows_of_an_epoch_that_was_interrupted() -> None:
    rows = [40, 20]
    before = in_step(rows)[:2]
    assert FullRound(2, sums_of(before[0] + before[1])).share([windows_of(0, 40)[2]]) == 1.0
    assert FullRound(2, sums_of(before[0])).share([windows_of(0, 40)[1]]) == pytest.approx(1 / 2)
