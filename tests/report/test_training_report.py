"""A whole run: what it tells of itself is what it did."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toys import classification, make_job, mlp
from virtual_time import VirtualClock
from waiting import eventually

from sparkdl import phases
from sparkdl.callbacks import Callback, TrainingReport, WorkerCallback
from sparkdl.errors import CallbackError
from sparkdl.phases import COMPUTE, DECODE, PHASES, WAIT, PhaseClock
from sparkdl.report import TrainingSummary, recording
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

pytestmark = pytest.mark.usefixtures("nobody_stays")


class Slow(WorkerCallback):
    """Rank 1 takes 5 s at the end of each window, in which the others wait for it."""

    def __init__(self, pass_time: Callable[[float], None]) -> None:
        self.pass_time = pass_time

    def after_step(self, step: Any) -> None:
        if step.rank == 1 and step.step_of_epoch % 5 == 0:
            self.pass_time(5.0)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has seconds pass for rank 1 and the driver once ranks 0 and 2 wait; else the clock stands."""
    clock, phases_of = VirtualClock(), dict[str, int]()
    switch = PhaseClock.switch

    def switched(self: PhaseClock, phase: int) -> int:
        before = switch(self, phase)
        phases_of[threading.current_thread().name] = phase
        return before

    def passes(seconds: float) -> None:
        others = ("sparkdl-rank-0", "sparkdl-rank-2")
        assert eventually(lambda: all(phases_of[other] == WAIT for other in others))
        clock.passed += seconds

    monkeypatch.setattr(PhaseClock, "switch", switched)
    for module in (phases, recording):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, time=time.time))
    return passes


def test_a_run_tells_who_was_waited_for(tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    path = tmp_path / "report.html"
    job = make_job(
        mlp(),
        epochs=2,
        strategy=ParameterAveraging(period=5),
        callbacks=(Slow(pass_time),),
        deadline_s=60.0,
    )
    outcome = run_world(
        job, classification([60, 60, 60]).shards(), callbacks=[TrainingReport(str(path))]
    )
    recorded, summary = outcome.recording, TrainingSummary(outcome.recording)
    # 15 steps an epoch of 4 rows: 6 windows of 5 steps.
    expected = np.zeros((3, len(PHASES)))
    expected[[0, 2], WAIT] = expected[1, COMPUTE] = 30.0
    np.testing.assert_array_equal(recorded.seconds, expected)
    assert recorded.duration_s == 30.0
    assert "rank 1" in " ".join(map(str, [summary.bound_by, path.read_text()]))
    assert recorded.rows.tolist() == [120, 120, 120]
    # 6 * 8 + 8 + 8 * 3 + 3 float64 to and fro in each of 3 rounds an epoch.
    model_bytes = 8 * (6 * 8 + 8 + 8 * 3 + 3)
    assert summary.model_bytes == model_bytes
    assert recorded.sent.tolist() == [6 * model_bytes] * 3
    assert recorded.received.tolist() == [7 * model_bytes] * 3  # the first center too
    assert summary.parameters == summary.trained_parameters == model_bytes // 8
    assert summary.history["loss"].tolist() == [epoch.loss for epoch in outcome.history]
    workers = summary.workers
    assert workers["examples"].tolist() == [120] * 3
    np.testing.assert_allclose(workers[list(PHASES)].to_numpy(), recorded.seconds)
    assert "finished" in path.read_text()
    assert 0 < recorded.uncertainty_s < 1


def test_reading_and_storing_rows_is_no_training() -> None:
    def slowly(batches: Any) -> Any:
        for batch in batches:
            time.sleep(0.05)
            yield batch

    shards = [slowly(shard) for shard in classification([20, 20]).shards(rows_a_batch=5)]
    recorded = run_world(make_job(mlp()), shards).recording  # type: ignore[arg-type]
    assert (recorded.seconds[:, 0] > 0.19).all()  # 4 batches of 50 ms each
    assert (recorded.before_training[:, 0] == recorded.seconds[:, 0]).all()
    assert (recorded.seconds[:, DECODE] > 0).all()


class Fails(Callback):
    def on_epoch(self, training: Any, summary: Any) -> None:
        raise ValueError("<b>no</b>")


def test_a_fit_that_fails_has_a_report_that_says_why(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with pytest.raises(CallbackError):
        run_world(
            make_job(mlp()),
            classification([8]).shards(),
            callbacks=[TrainingReport(str(path)), Fails()],
        )
    page = path.read_text()
    assert "failed" in page
    assert "&lt;b&gt;no&lt;/b&gt;" in page


def test_a_report_that_cannot_be_written_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    rounds = []

    class Rounds(Callback):
        def on_round(self, training: Any, reports: Any) -> None:
            rounds.append(reports)

    job = make_job(mlp(), epochs=1)
    with pytest.raises(CallbackError, match="TrainingReport failed in on_start"):
        run_world(
            job,
            classification([8]).shards(),
            callbacks=[Rounds(), TrainingReport(str(tmp_path / "file" / "report.html"))],
        )
    assert not rounds
