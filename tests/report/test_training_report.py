"""The report of a training, and the comparison of several."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import profiles
import pytest
from every_row import every_row
from profiles import BATCH, STEP_S
from recordings import Play, busy_world
from toys import classification, make_job, mlp
from virtual_time import VirtualClock
from waiting import eventually

import sparkdl
from sparkdl import phases
from sparkdl.callbacks import Callback, TrainingReport, WorkerCallback
from sparkdl.errors import CallbackError, ConfigError
from sparkdl.phases import COMPUTE, DECODE, PHASES, WAIT, PhaseClock
from sparkdl.planner.profile import Profile
from sparkdl.planner.simulation.cluster import LogNormal
from sparkdl.planner.simulation.exchanges import Exchange
from sparkdl.planner.traffic import Traffic
from sparkdl.report import TrainingSummary, recording
from sparkdl.report.simulation import _times
from sparkdl.strategies import ElasticAveraging, GradientAllReduce, ParameterAveraging, PowerSGD
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
    slow, report = (Slow(pass_time),), [TrainingReport(str(path))]
    job = make_job(mlp(), epochs=2, strategy=ParameterAveraging(5), callbacks=slow)
    outcome = run_world(job, classification([60, 60, 60]).shards(), callbacks=report)
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
    assert summary.parameters == recorded.setup.trained == model_bytes // 8
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
    callbacks = [TrainingReport(str(path)), Fails()]
    with pytest.raises(CallbackError):
        run_world(make_job(mlp()), classification([8]).shards(), callbacks=callbacks)
    page = path.read_text()
    assert "failed" in page
    assert "&lt;b&gt;no&lt;/b&gt;" in page


def test_a_report_that_cannot_be_written_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    rounds = []

    class Rounds(Callback):
        def on_round(self, training: Any, reports: Any) -> None:
            rounds.append(reports)

    callbacks = [Rounds(), TrainingReport(str(tmp_path / "file" / "report.html"))]
    with pytest.raises(CallbackError, match="TrainingReport failed in on_start"):
        run_world(make_job(mlp()), classification([8]).shards(), callbacks=callbacks)
    assert not rounds


MODEL = 1e6


def profile(**changes: Any) -> Profile:
    """Of two workers of one host, who send three copies of a model each way."""
    sent = Traffic(through="driver", up=3 * MODEL, down=3 * MODEL, period=5)
    known = {"workers": 2, "hosts": 1, "rows": 4 * BATCH * 100, "exchange_s": 0.01}
    known |= {"strategy": "ParameterAveraging(period=7)", "traffic": sent}
    return profiles.profile(**{**known, **changes})


def simulate(**given: Any) -> Any:
    return sparkdl.simulate(profile(), **{"workers": 4, "link": "80 Mbit/s", **given})


def test_an_epoch_is_computed_and_exchanged_as_often_as_the_rows_ask_for() -> None:
    """100 steps of 20 ms; 20 rounds in which 4 workers send and are sent 3 MB at 10 MB/s."""
    found = simulate(strategies=[ParameterAveraging()])
    row = found.loc["ParameterAveraging(period=5)"]
    assert row.seconds == pytest.approx(2.0 + 20 * 4 * 2 * 0.3)
    assert row.computing == pytest.approx(2.0 / row.seconds)
    assert row[["computing", "waiting", "exchanging"]].sum() == pytest.approx(1)
    assert (row.rounds, row.part, row.mean_staleness) == (20, 1.0, 0.0)


def test_the_fastest_comes_first_and_the_fit_s_own_strategy_is_among_them() -> None:
    table = simulate()
    assert list(table.seconds) == sorted(table.seconds)
    assert "as fitted: ParameterAveraging(period=7)" in table.index
    assert "GradientAllReduce()" in table.index


def test_a_strategy_of_one_s_own_is_described_by_what_it_sends() -> None:
    own = Exchange(name="mine", way="group", up=4e6, period=50)
    found = simulate(strategies=[own, GradientAllReduce()])
    assert found.seconds["mine"] == pytest.approx(2.0 + 2 * 2 * 3 * 0.1)


def test_slow_workers_are_waited_for_in_step_only() -> None:
    strategies = [ParameterAveraging(20), ElasticAveraging(20, mode="asynchronous")]
    found = simulate(slow={3: 4.0}, strategies=strategies, link="10 Gbit/s")
    assert found.waiting["ParameterAveraging(period=20)"] > 0.5
    assert found.max_staleness["ElasticAveraging(period=20, mode='asynchronous')"] > 3


@every_row((0.5, 0.5), (LogNormal(0.3, 0.1), 0.3))
def test_steps_take_what_one_says(given: Any, mean: float) -> None:
    row = simulate(step_s=given, strategies=[ParameterAveraging()]).iloc[0]
    assert row.computing * row.seconds == pytest.approx(100 * mean, rel=0.1)


def test_steps_vary_as_the_windows_of_the_fit_did(play: Play) -> None:
    played = busy_world(play, 2, 0, traffic=Traffic(through="driver", up=4e3, down=4e3))
    seconds = [0.5, 1.0, 2.0, 1.0]
    for epoch in (1, 2):
        for window in range(40):
            for rank in (0, 1):
                played.spend(rank, f"host-{rank}", compute=seconds[window % 4])
                played.window(rank, examples=32)
        played.epoch(epoch, rounds=40, seconds=40 * 1.2, examples=2 * 40 * 32)
    summary = TrainingSummary(played.recording)
    times = _times(summary, summary.profile, None)
    assert times.mean == pytest.approx(1.125, rel=0.05)
    assert times.sigma == pytest.approx(0.49, abs=0.05)  # the logarithms of 1/2, 1, 1 and 2


@every_row(
    ({"workers": 0}, "workers must be a whole number >= 1"),
    ({"workers": 2.5}, "workers must be a whole number >= 1"),
    ({"link": 0}, "a link of 0 bytes a second"),
    ({"link": "fast"}, "cannot be read"),
    ({"slow": {4: 2.0}}, "4 workers have ranks 0 to 3"),
    ({"slow": {1: 0}}, r"slow\[1\] must be a number > 0"),
    ({"rows": 0}, "rows must be a whole number >= 1"),
    ({"strategies": []}, "strategies is empty"),
    ({"strategies": ["averaging"]}, "is no strategy, such as"),
    ({"strategies": [GradientAllReduce(compression=PowerSGD(2))]}, "is not known: it depends"),
    ({"step_s": 0}, "step_s must be a number > 0"),
    ({"step_s": [0.1]}, "step_s must be a number > 0"),
    ({"workers_per_host": 0}, "workers_per_host must be a whole number >= 1"),
    ({"seed": -1}, "seed must be a whole number >= 0"),
)
def test_what_cannot_be_simulated_is_an_error_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(**given)


def test_steps_that_send_gradients_too_are_not_taken_for_computing() -> None:
    sent = Traffic(through="workers", up=MODEL, hidden="backward")
    several = {"strategy": "GradientAllReduce(bucket_mb=25)", "aggregation": None}
    for traffic in (sent, None):  # as what TopK sends is not known
        with pytest.raises(ConfigError, match="give step_s, or the summary of a fit with 1 worker"):
            sparkdl.simulate(profile(traffic=traffic, **several), workers=4, link="1 Gbit/s")
        alone = profile(traffic=traffic, workers=1, worker_step_s=(STEP_S,), **several)
        for fit, step_s in ((profile(traffic=traffic, **several), STEP_S), (alone, None)):
            assert len(sparkdl.simulate(fit, workers=4, link="1 Gbit/s", step_s=step_s)) > 1
            assert _times(fit, fit, step_s).mean == STEP_S


def test_a_model_is_no_fit_to_start_from() -> None:
    with pytest.raises(ConfigError, match=r"a dict is no fit: give model\.summary"):
        sparkdl.simulate({}, workers=4, link="1 Gbit/s")  # type: ignore[arg-type]


def test_numbers_may_be_numpy_s_or_floats_without_a_fraction() -> None:
    usual, other = (
        simulate(workers=workers, seed=seed, step_s=step_s)
        for workers, seed, step_s in ((4, 1, 0.1), (4.0, np.int64(1), np.float32(0.1)))
    )
    np.testing.assert_allclose(usual.seconds, other.seconds, rtol=1e-6)


def test_an_epoch_of_any_length_is_simulated_in_bounded_time() -> None:
    found = simulate(rows=10**13, strategies=[ParameterAveraging()]).iloc[0]
    assert found.rounds == 10**13 // (4 * BATCH) / 5
    assert found.part < 1e-3
    assert found.seconds == pytest.approx(found.rounds * (5 * STEP_S + 4 * 2 * 0.3), rel=1e-3)


def test_a_fit_without_rounds_has_nothing_to_start_from(play: Play) -> None:
    summary = TrainingSummary(busy_world(play, 2, 0).recording)
    with pytest.raises(ConfigError, match="no round of an epoch that has ended was recorded"):
        sparkdl.simulate(summary, workers=4, link="1 Gbit/s")
