"""What is read of a fit's recording, and kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from every_row import every
from profiles import profile
from toys import classification, make_job, mlp

from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.planner.profile import Profile
from sparkdl.planner.traffic import Traffic
from sparkdl.report import Recording, Setup, TrainingSummary
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

DRIVER = Traffic(through="driver", up=100.0, down=100.0, period=5)


def recorded(epochs: int, slow: float = 1.0, period: int = 5, rows: int = 40) -> Recording:
    """Two workers with rows for ten steps; the first epoch takes each of them nine seconds more."""
    setup = Setup(model="Net", strategy="S()", batch_size=4, traffic=DRIVER, aggregation="driver")
    recording = Recording(2, setup)
    recording.hosts = ["a", "b"]
    for epoch in range(1, epochs + 1):
        for rank in (0, 1):
            warm = 9.0 if epoch == 1 else 0.0
            computed = (slow if rank else 1.0) + warm
            recording.seconds[rank] += np.array([0, 0.5, computed - 0.5, 1.0, 0.5, 0])
            report = {"rank": rank, "epoch": epoch, "step": 1, "loss_sum": 0.0, "last": True}
            recording.note(WindowReport(examples=rows, **report))  # type: ignore[arg-type]
        seconds = slow + 1.5 + (9.0 if epoch == 1 else 0.0)
        recording.note(
            EpochSummary(epoch=epoch, loss=0.0, examples=2 * rows, rounds=2, seconds=seconds)
        )
    return recording


def test_the_first_epoch_is_left_out_if_there_are_others() -> None:
    found = Profile.of(recorded(3))
    assert found.warm
    assert found.worker_step_s == pytest.approx((0.1, 0.1))
    assert found.round_s == pytest.approx(0.75)
    assert (found.rounds, found.rows, found.epoch_seconds) == (4, 80, (2.5, 2.5))
    cold = Profile.of(recorded(1))
    assert not cold.warm
    assert cold.worker_step_s == pytest.approx((1.0, 1.0))
    assert cold.round_s == pytest.approx(0.75)


def test_a_round_is_what_holds_up_the_slowest_worker() -> None:
    found = Profile.of(recorded(3, slow=2.0))
    assert found.worker_step_s == pytest.approx((0.1, 0.2))
    assert found.slowest == pytest.approx(0.2 / 0.15)
    assert found.round_s == pytest.approx(0.75)


def test_an_epoch_that_has_only_begun_changes_nothing() -> None:
    whole, begun = recorded(3), recorded(3)
    for rank in (0, 1):
        begun.seconds[rank] += np.array([0, 0.25, 0.25, 0.5, 0.25, 0])
        report = {"rank": rank, "epoch": 4, "step": 1, "loss_sum": 0.0, "last": False}
        begun.note(WindowReport(examples=20, **report))  # type: ignore[arg-type]
    assert Profile.of(begun) == Profile.of(whole)


def test_epochs_before_a_checkpoint_do_not_count() -> None:
    recording = recorded(3)
    recording.history.insert(0, EpochSummary(epoch=0, loss=0, examples=9, rounds=1, seconds=99.0))
    recording.epochs_before = 1
    assert Profile.of(recording).epoch_seconds == (2.5, 2.5)


def test_the_spread_is_that_of_three_epochs_or_more() -> None:
    assert profile(2, epoch_seconds=(1.0, 2.0)).spread is None
    assert profile(2, epoch_seconds=(1.0, 2.0, 3.0)).spread == pytest.approx(0.5)


def test_a_fit_without_an_epoch_or_a_round_has_no_profile() -> None:
    for recording in (Recording(2), recorded(0), recorded(2, rows=0)):
        with pytest.raises(ConfigError, match="nothing to plan from"):
            Profile.of(recording)


def test_a_training_has_the_profile_of_what_it_did() -> None:
    """Four steps of three rows in each of three epochs, a round after two and at the end."""
    outcome = run_world(
        make_job(mlp(), strategy=ParameterAveraging(2), batch_size=3, epochs=3),
        classification([12, 12]).shards(),
    )
    found = TrainingSummary(outcome.recording).profile
    assert (found.workers, found.rows, found.batch_size, found.rounds) == (2, 24, 3, 4)
    assert found.model == "Sequential"
    assert found.aggregation == "driver"
    assert min(found.worker_step_s) > 0
    seconds = sum(found.epoch_seconds)
    busy = 8 * max(found.worker_step_s)
    assert found.round_s * found.rounds + busy == pytest.approx(max(seconds, busy))
    plan = TrainingSummary(outcome.recording).plan(link="1 Gbit/s", workers=[1, 2, 4])
    assert plan.predict(4).seconds > 0


def test_summaries_and_profiles_of_several_fits_make_one_plan() -> None:
    def summary(sizes: list[int]) -> TrainingSummary:
        job = make_job(mlp(), strategy=ParameterAveraging(2), batch_size=3, epochs=2)
        return TrainingSummary(run_world(job, classification(sizes).shards()).recording)

    one, two = summary([12]), summary([12, 12])
    assert [each.workers for each in one.plan(two).profiles] == [1, 2]
    assert [each.workers for each in one.plan(two.profile).profiles] == [1, 2]


def test_a_profile_comes_back_from_json_and_from_a_job_s_result() -> None:
    for given in (profile(2), profile(1, traffic=DRIVER, aggregation=None)):
        assert Profile.from_json(given.to_json()) == given
        result = {"status": "complete", "profile": json.loads(given.to_json())}
        assert Profile.from_json(json.dumps(result)) == given


def texts() -> Iterator[tuple[str, str]]:
    good = json.loads(profile(2).to_json())
    yield "", "no profile"
    yield "[]", "no profile"
    yield "{}", "no profile"
    yield '{"profile": null}', "no profile"
    yield json.dumps({**good, "format": 2}), "format 2, this version 1"
    yield json.dumps({**good, "round_s": float("nan")}), "not numbers >= 0"
    yield json.dumps({**good, "worker_step_s": [0.0, 0.0]}), "no profile"
    yield json.dumps({**good, "worker_step_s": [-1.0]}), "no profile"
    yield json.dumps({**good, "rows": 0}), "rows and rounds are not >= 1"
    yield json.dumps({**good, "rows": "many"}), "rows is 'many'"
    yield json.dumps({**good, "traffic": {**good["traffic"], "up": "x"}}), "no profile"
    yield json.dumps({**good, "traffic": {**good["traffic"], "period": 0}}), "are not >= 1"
    yield json.dumps({**good, "traffic": {"through": "driver"}}), "no profile"
    yield json.dumps({name: each for name, each in good.items() if name != "rows"}), "no profile"


@every(("text", "message"), texts())
def test_what_is_no_profile_is_refused(text: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Profile.from_json(text)
