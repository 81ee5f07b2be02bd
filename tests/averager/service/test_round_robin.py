"""Turns: each worker alone with the center, in the order of ranks, and nobody else's business."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from crew import WAIT_S, crew, sent_values, window
from decided import Told, do
from decisions import Every, Run, only, report, started
from every_row import every

from sparkdl.averager.messages.progress import Position
from sparkdl.averager.policies.round_policy import RoundRobin
from sparkdl.averager.values.wire_format import CHANGES


def run_of(world_size: int, **options: Any) -> Run:
    return started(world_size, policy=RoundRobin(1), **options)


def close(run: Run, rank: int, steps: int = 1, **fields: Any) -> list[int]:
    """A rank has trained a window; returns who may contribute then."""
    told = replace(report(rank, step=steps, **fields), step_of_epoch=steps)
    return received(run.tell("window_closed", run.members[rank], told))


def add(run: Run, rank: int) -> list[int]:
    """A rank's contribution is whole, and it takes the reply; returns who may contribute then."""
    return received(run.add(rank) + run.take(rank))


def received(decisions: list[Told]) -> list[int]:
    return [each.member.rank for each in only(do.receive, decisions)]


def test_who_is_ready_first_waits_for_those_before() -> None:
    run = run_of(3)
    assert close(run, 2) == []
    assert close(run, 0) == [0]
    assert add(run, 0) == []
    assert close(run, 0, 2) == []
    assert close(run, 1) == [1]
    assert [add(run, rank) for rank in (1, 2)] == [[2], [0]]


def test_who_has_had_its_turn_goes_on_at_once() -> None:
    run = run_of(3)
    close(run, 0)
    assert [each.member.rank for each in only(do.reply, run.add(0))] == [0]


def test_a_turn_of_who_is_lost_is_skipped_and_it_has_one_when_it_is_back() -> None:
    run = run_of(3, max_failures=1)
    close(run, 1)
    close(run, 2)
    assert received(run.lose(0)) == [1]
    assert [add(run, rank) for rank in (1, 2)] == [[2], []]
    run.come_back(0)
    run.take()
    assert close(run, 1, 2) == []
    assert close(run, 0) == [0]
    assert add(run, 0) == [1]


def test_a_turn_of_who_is_lost_in_it_passes_on() -> None:
    run = run_of(3, max_failures=1)
    close(run, 1)
    assert close(run, 0) == [0]
    decisions = run.lose(0)
    assert only(do.start_over, decisions) == [do.start_over(())]
    assert received(decisions) == [1]


def test_who_has_ended_the_epoch_has_no_more_turns_and_the_next_epoch_begins_with_the_first() -> (
    None
):
    run = run_of(3)
    close(run, 0)
    add(run, 0)
    close(run, 1, last=True)
    add(run, 1)
    close(run, 2)
    add(run, 2)
    close(run, 0, 2, last=True)
    add(run, 0)
    assert close(run, 2, 2, last=True) == [2]
    run.add(2)
    run.take()
    assert close(run, 1, epoch=2) == []
    assert close(run, 0, epoch=2) == [0]


def test_a_window_without_rows_takes_its_turn_too() -> None:
    run = run_of(2)
    assert close(run, 1) == []
    assert close(run, 0, 0, examples=0, last=True) == [1]


@every(
    ("steps", "period", "first"),
    [((0, 0, 0), 2, 0), ((4, 2, 2), 2, 1), ((4, 4, 2), 2, 2), ((5, 4, 4), 2, 1), ((5, 6, 6), 2, 0)],
)
def test_a_resumed_run_goes_on_with_who_has_had_the_fewest(
    steps: tuple[int, ...], period: int, first: int
) -> None:
    policy = RoundRobin(period)
    policy.begin([Position(step=n, step_of_epoch=n) for n in steps])
    assert [rank for rank in range(3) if policy.may_contribute(rank, {0, 1, 2})] == [first]


def test_who_waits_for_its_turn_is_told_that_the_run_goes_on_and_is_not_late() -> None:
    run = run_of(2, max_failures=2)
    run.wait(1)
    close(run, 1)
    decisions = run.wait(20)
    assert only(do.say_waiting, decisions) == [do.say_waiting((run.members[1],))]
    assert only(do.drop, decisions) == [do.drop(run.members[0])]
    assert received(decisions) == [1]


def test_a_turn_that_has_come_waits_for_a_checkpoint_and_comes_behind_it() -> None:
    run = run_of(2, checkpoints=Every(1))
    close(run, 0)
    close(run, 1)
    run.add(0)
    assert received(run.take(0)) == []
    run.tell("worker_state_written", run.members[0])
    assert received(run.tell("checkpoint_ended", saved=True)) == [1]


def test_others_may_train_longer_than_who_waits_could_go_on_sending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every window, not only in the first, for which late comers wait anyway.

    So whoever waits for its turn sends no values, which nobody would read.
    """
    sent = sent_values(monkeypatch)
    with crew(
        2, policy=RoundRobin(1), wire_format=CHANGES, deadline_s=60.0, max_failures=1
    ) as workers:
        for step in (1, 2):
            waits = workers.exchange(window(1, step))
            workers.wait_for("window_closed", 1, step)
            for _ in range(250 * (step - 1)):
                workers.client(0).heartbeat()
                workers.wait(1.0)
            assert not waits.done()
            assert len(sent) == 2 * (step - 1)
            workers.exchange(window(0, step)).result(WAIT_S)
            waits.result(WAIT_S)
        assert workers.averager.losses == []
