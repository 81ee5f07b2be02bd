"""What a report says an epoch would take with more workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.events import EpochSummary, WindowReport
from sparkdl.planner.traffic import Traffic
from sparkdl.report import Recording, Setup
from sparkdl.report.findings import findings
from sparkdl.report.page import render


def recorded(epochs: int = 3, **setup: Any) -> Recording:
    """Two workers; an epoch of ten steps of 0.5 s, and ten rounds of 0.1 s."""
    driver = Traffic(through="driver", up=100.0, down=100.0, period=1)
    known = {"model": "Net", "batch_size": 4, "traffic": driver, "aggregation": "driver"}
    recording = Recording(2, Setup(**{**known, **setup}))
    for epoch in range(1, epochs + 1):
        for rank in (0, 1):
            recording.seconds[rank] += np.array([0, 0, 5.0, 1.0, 0, 0])
            report = {"rank": rank, "epoch": epoch, "step": 1, "loss_sum": 0.0, "last": True}
            recording.note(WindowReport(examples=40, **report))  # type: ignore[arg-type]
        recording.note(EpochSummary(epoch=epoch, loss=0, examples=80, rounds=10, seconds=6.0))
    return recording


def test_the_last_finding_is_an_epoch_with_four_times_as_many_workers() -> None:
    """Three steps of 0.5 s and as many rounds, of 0.1 s each, or 0.05 s for each worker.

    That is 1.8 to 2.7 s, and the model's own error.
    """
    *_, last = findings(recorded())
    assert pytest.approx((1.53, 3.105)) == (0.85 * 1.8, 1.15 * 2.7)
    assert last.sentence == (
        "With 8 workers, an epoch would take 1.53 s to 3.1 s in place of 6 s, at an efficiency of "
        "about 51 %."
    )
    assert "summary.plan()" in last.advice
    assert "With 8 workers, an epoch would take" in render(recorded())


def test_nothing_is_said_where_this_fit_does_not_tell() -> None:
    gradients = Traffic(through="workers", up=100.0, hidden="backward")
    among = Traffic(through="workers", up=100.0)
    for recording in (
        recorded(traffic=None),
        recorded(epochs=0),
        recorded(traffic=gradients, aggregation=None),
    ):
        assert not any("would take" in each.sentence for each in findings(recording))
    assert any("would take" in each.sentence for each in findings(recorded(traffic=among)))
