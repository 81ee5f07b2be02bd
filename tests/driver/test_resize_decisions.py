"""When a run changes its number of workers, decided without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from observed import Free, Heard
from toys import make_job, mlp

from sparkdl.averager.coordination.run_state import Restart
from sparkdl.averager.run_events import EpochValidated, Progress
from sparkdl.averager.service.saving import Snapshot
from sparkdl.callbacks import Training
from sparkdl.driver import serving
from sparkdl.driver.resizing import Resize
from sparkdl.events import EpochSummary

ROWS = 48


class Served:
    """What a ``Resize`` asks of an averager."""

    losses: Sequence[str] = ()
    epoch, epochs_known = 2, 1

    def __init__(self, workers: int) -> None:
        self.world_size, self.there, self.at = workers, set(range(workers)), 0.0

    def now(self) -> float:
        return self.at

    def snapshot(self) -> Snapshot:
        progress = replace(Progress.start(self.world_size), epoch=self.epoch)
        return Snapshot(center=[torch.zeros(2)], restart=Restart(progress=progress))


def resizing(workers: int, slots: Free, **options: Any) -> tuple[Resize, Any]:
    """What decides, having begun, and the averager that it looks at."""
    resize = Resize(make_job(mlp(), epochs=9, **options), slots)
    averager: Any = Served(workers)
    resize.begin(averager)
    return resize, averager


def test_an_epoch_whose_end_callbacks_are_about_to_hear_of_is_not_trained_again() -> None:
    resize, averager = resizing(3, Free([]), max_workers=5)
    averager.there = {0, 1}
    assert resize.look(averager) is None
    averager.at, averager.epochs_known = 60.0, 2
    assert resize.look(averager) is None
    averager.epoch = 3
    assert resize.epoch_ended(averager, 2) is None
    assert resize.look(averager) == "3 workers become 2"
    assert resize.look(averager) is None, "the averager has been told to stop"
    snapshot = resize.take()
    assert snapshot is not None
    assert snapshot.restart.progress is not None
    assert snapshot.restart.progress.epoch == 3


def test_the_end_of_an_epoch_that_is_to_be_trained_again_is_not_told_of() -> None:
    """It may have come between the decision and the averager's stop."""
    resize, averager = resizing(3, Free([]), max_workers=5)
    job, heard = make_job(mlp(), epochs=9, max_workers=5), Heard()
    served = serving.Serving(
        job, serving.Observers(callbacks=[heard]), Training(9), None, None, resize
    )
    averager.there = {0, 1}
    resize.look(averager)
    averager.at = 60.0
    summary = EpochSummary(epoch=1, loss=0.5, examples=ROWS, rounds=4, seconds=1.0)
    assert resize.look(averager)
    served._note(averager, summary)
    served._note(averager, EpochValidated(summary))
    assert (heard.told, served.training.recording.history) == ([], [])


def test_a_lost_worker_is_given_a_free_slot_before_the_others_go_on_without_it() -> None:
    slots = Free([1] * 9)
    resize, averager = resizing(3, slots, min_workers=2, max_workers=5)
    for at, there, given, due in [
        (0.0, {0, 1, 2}, 0, False),
        (10.0, {0, 2}, 0, False),
        (14.0, {0, 2}, 0, False),
        (15.0, {0, 2}, 1, False),
        (60.0, {0, 2}, 1, False),  # one slot is enough
        (61.0, {0, 1, 2}, 1, False),
        (62.0, {0}, 1, False),
        (67.0, {0}, 3, False),
        (300.0, {0}, 3, False),  # fewer than are allowed
        (301.0, {0, 2}, 3, True),
    ]:
        averager.at, averager.there = at, there
        reason = resize.look(averager)
        assert (slots.given, reason is not None) == (given, due), at
    assert reason == "3 workers become 2"
    snapshot = resize.take()
    assert snapshot.restart.progress is not None
    assert len(snapshot.restart.progress.positions) == 2
    assert resize.take() is None


def test_no_checkpoint_of_rounds_that_are_given_up_is_taken_for_one_of_the_epochs_start() -> None:
    resize, averager = resizing(3, Free([]), max_workers=5)
    averager.there = {0, 1}
    assert resize.look(averager) is None
    averager.at = 60.0
    assert resize.look(averager) == "3 workers become 2"
    snapshot = resize.take()
    assert snapshot is not None
    assert not snapshot.restart.saved


def test_of_tasks_with_several_workers_whole_ones_go_on() -> None:
    resize, averager = resizing(6, Free([], ranks_a_task=2), max_workers=8)
    averager.there = {0, 1, 2, 4, 5}
    assert resize.look(averager) is None
    averager.at = 60.0
    assert resize.look(averager) == "6 workers become 4"


def test_those_who_are_away_at_the_end_of_an_epoch_are_not_counted() -> None:
    resize, averager = resizing(3, Free([1, 2]), max_workers=5)
    averager.there = {0, 2}
    assert resize.epoch_ended(averager, 2) is None
    assert resize.epoch_ended(averager, 3) == "3 workers become 4"


def test_progress_is_dealt_to_others_only_between_epochs() -> None:
    with pytest.raises(ValueError, match="3 rounds of epoch 1"):
        replace(Progress.start(2), rounds=3).resized(4)
