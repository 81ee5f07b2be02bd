"""Workers that follow the losses of epochs are told once all have validated, and not before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decisions import Run, expect_failure, only, started
from every_row import every
from validating import HELD_OUT, ask, told, validate, with_held_out_rows

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.messages.headers import read_epoch_losses
from sparkdl.averager.messages.progress import Position, Progress
from sparkdl.errors import DeadlineError, TrainingError
from sparkdl.events import EpochSummary


def test_without_held_out_rows_the_training_loss_is_told_at_once() -> None:
    run = started(2)
    run.round(last=True)
    assert told(ask(run, 1)) == {1: (0.0,)}


def test_everyone_is_told_when_the_last_has_validated() -> None:
    run = with_held_out_rows(Run(2))
    run.round(last=True)
    validate(run, 0, 3.0)
    assert not told(ask(run, 0))
    assert told(validate(run, 1, 5.0)) == {0: (4.0,)}
    assert told(ask(run, 1)) == {1: (4.0,)}


def test_only_what_is_not_known_is_told() -> None:
    run = with_held_out_rows(Run(1))
    for epoch in (1, 2, 3):
        run.round(last=True, epoch=epoch, step=epoch)
        validate(run, 0, float(epoch), epoch)
    assert told(ask(run, 0, epochs=3, known=1)) == {0: (2.0, 3.0)}


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
    assert only(do.Welcome, run.read(1, HELD_OUT))
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


def test_who_does_not_validate_is_named() -> None:
    run = with_held_out_rows(Run(3, deadline_s=10.0))
    run.round(last=True)
    validate(run, 0, 2.0)
    ask(run, 0)
    validate(run, 2, 2.0)
    ask(run, 2)
    decisions = run.wait(30.0)
    assert only(do.SayWaiting, decisions)
    expect_failure(
        run, decisions, DeadlineError, "rank 1 .*did not report the loss on its held-out rows"
    )


@every("held_out", [True, False])
def test_nobody_is_overdue_while_the_driver_takes_its_time_with_an_epoch(held_out: bool) -> None:
    run = Run(2, deadline_s=10.0)
    run.coordinator = Coordinator(replace(run.coordinator.state.spec, followed=True), run.now)
    with_held_out_rows(run, HELD_OUT if held_out else None)
    run.round(last=True)
    for rank in run.ranks if held_out else ():
        validate(run, rank, 2.0)
    assert not told(ask(run, 0))
    assert only(do.SayWaiting, run.wait(300.0))  # a callback that evaluates much, or a dead server
    assert run.failure is None
    assert list(told(run.tell(on.EpochApproved(1)))) == [0]
    run.wait(9.0)
    assert run.failure is None
    expect_failure(run, run.wait(2.0), DeadlineError, "did not contribute to round 2")


def test_who_waits_for_an_epoch_that_has_not_ended_is_refused() -> None:
    run = started(2)
    expect_failure(
        run, ask(run, 0), TrainingError, "asked for the losses of 1 epochs, but only 0 have ended"
    )


@every(
    "header",
    [
        {"epoch_losses": 1},
        {"epoch_losses": 1, "known": 1},
        {"epoch_losses": 1, "known": -1},
        {"epoch_losses": "1", "known": 0},
        {"epoch_losses": True, "known": 0},
        {"epoch_losses": [1], "known": 0.0},
    ],
)
def test_a_question_that_makes_no_sense_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="rank 3 sent an invalid request for losses"):
        read_epoch_losses(header, 3)
