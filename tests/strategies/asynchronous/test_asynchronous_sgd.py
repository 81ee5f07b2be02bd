"""Asynchronous SGD: the center is what the commits give, whoever is waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import pytest
import torch
from interruptions import same_bits
from misbehaving import KillsOnce, die_after, kill_once, resume_after
from recorded import recorded_decisions
from replayed import ByHand
from torch import nn
from toys import (
    classification,
    make_job,
    mlp,
    relative_error,
    sgd_on_union,
)

from sparkdl.averager.coordination import decisions as do
from sparkdl.checkpoint.object_spec import load_object, save_object
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError
from sparkdl.estimator.persistence import EXPECTED
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.strategies import (
    ASP,
    BSP,
    PBSP,
    PSSP,
    SSP,
    AsynchronousSGD,
    ParameterAveraging,
    Softsync,
)
from sparkdl.testing import run_world
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(misbehaving)

SIZES = [40, 33, 21]
DATA = classification(SIZES)
EQUAL = classification([24, 24, 24])
STRATEGY = AsynchronousSGD(period=2, rate=0.8)
AVERAGING = ParameterAveraging(period=2, average_optimizer_state=False)


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    settings = {"strategy": STRATEGY, "epochs": 3, "max_failures": 1, **changes}
    return make_job(model or mlp(), **settings)


def by_hand(strategy: AsynchronousSGD) -> ByHand:
    return ByHand(DATA, strategy.rate, scale_by_staleness=strategy.scale_by_staleness)


@pytest.mark.parametrize("scale_by_staleness", [True, False], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("barrier", [ASP(), SSP(1), PSSP(1, 1), Softsync(2)], ids=str)
def test_the_center_is_what_the_decisions_say(barrier: Any, scale_by_staleness: bool) -> None:
    strategy = replace(STRATEGY, barrier=barrier, scale_by_staleness=scale_by_staleness)
    with recorded_decisions() as decisions:
        outcome = run_world(job(strategy=strategy), DATA.shards())
    assert relative_error(outcome.module, by_hand(strategy).follow(decisions)) < 1e-9
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    assert outcome.history[-1].loss < outcome.history[0].loss


def test_alone_it_is_sgd() -> None:
    data = classification([41])
    outcome = run_world(job(strategy=AsynchronousSGD(period=2)), data.shards())
    oracle = sgd_on_union(mlp(), data, lr=0.1, epochs=3, batch_size=4, dtype=torch.float64)
    assert relative_error(outcome.module, oracle) < 1e-9


def test_with_everyone_in_each_update_it_is_parameter_averaging() -> None:
    bsp = job(strategy=AsynchronousSGD(period=2, barrier=BSP()))
    outcome, average = (
        run_world(bsp, DATA.shards()),
        run_world(job(strategy=AVERAGING), DATA.shards()),
    )
    assert relative_error(outcome.module, average.module) < 1e-12
    assert same_bits(outcome, run_world(bsp, DATA.shards()))
    assert [(row.mean_staleness, row.max_staleness) for row in outcome.history] == [(0.0, 0)] * 3


@pytest.mark.parametrize("barrier", [SSP(0), PBSP(2)], ids=str)
def test_where_everyone_waits_for_everyone_the_changes_of_equal_workers_add_up_to_their_mean(
    barrier: Any,
) -> None:
    strategy = AsynchronousSGD(2, barrier=barrier)
    outcome = run_world(job(strategy=strategy), EQUAL.shards())
    average = run_world(job(strategy=AVERAGING), EQUAL.shards())
    assert relative_error(outcome.module, average.module) < 1e-12


def test_a_killed_worker_comes_back_and_no_row_is_lost_or_counted_twice(tmp_path: Path) -> None:
    strategy = replace(STRATEGY, barrier=SSP(1))
    killed = job(KillsOnce(tmp_path, 12), strategy=strategy)
    with recorded_decisions() as decisions:
        outcome = kill_once(killed, DATA.shards())
    trained = outcome.module.get_submodule("net")
    assert relative_error(trained, by_hand(strategy).follow(decisions)) < 1e-9


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("barrier", "windows"), [(ASP(), 4), (ASP(), 14), (SSP(0), 4), (PBSP(1), 14)], ids=str
)
def test_a_resumed_training_goes_on_where_each_worker_was(
    tmp_path: Path, barrier: Any, windows: int
) -> None:
    going = job(strategy=replace(STRATEGY, barrier=barrier))
    outcome = resume_after(windows, going, DATA.shards(), tmp_path)
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    assert outcome.history[-1].loss < outcome.history[0].loss


def test_a_resumed_training_of_everyone_in_each_update_ends_in_the_same_bits(
    tmp_path: Path,
) -> None:
    bsp = job(strategy=replace(STRATEGY, barrier=BSP()))
    resumed = resume_after(14, bsp, DATA.shards(), tmp_path)
    assert same_bits(resumed, run_world(bsp, DATA.shards()))


def test_a_resumed_history_has_the_staleness_of_windows_before(tmp_path: Path) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    with recorded_decisions() as decisions:
        die_after(14, job(), DATA.shards(), policy)
        outcome = run_world(job(), DATA.shards(), checkpoints=policy)
    reports = [each.event for each in decisions if isinstance(each, do.Report)]
    # What was committed behind the checkpoint is trained again: the last report counts.
    windows = {(w.rank, w.step): w for w in reports if isinstance(w, WindowReport) and w.examples}
    for row in outcome.history:
        told = [w.staleness for w in windows.values() if w.epoch == row.epoch]
        assert row.mean_staleness == pytest.approx(sum(told) / len(told), rel=1e-12)
        assert row.max_staleness == max(told) > 0
    first = next(each for each in reports if isinstance(each, EpochSummary))
    assert first == outcome.history[0]


def test_with_another_barrier_a_checkpoint_is_refused(tmp_path: Path) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(4, job(), DATA.shards(), policy)
    other = job(strategy=replace(STRATEGY, barrier=SSP(2)))
    with pytest.raises(ConfigError, match=r"strategy: was AsynchronousSGD\(.*barrier=ASP\(\)"):
        run_world(other, DATA.shards(), checkpoints=policy)


@pytest.mark.parametrize("barrier", [ASP(), BSP(), SSP(2), PBSP(3), PSSP(3, 2), Softsync(2)])
def test_it_is_saved_and_loaded_without_trust(tmp_path: Path, barrier: Any) -> None:
    strategy = AsynchronousSGD(3, 0.5, True, barrier)
    spec = save_object(strategy, tmp_path, "strategy")
    expected = EXPECTED["strategy"]
    assert load_object(spec, tmp_path, "strategy", expected=expected, trust=False) == strategy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"period": 0}, "period must be a whole number of steps >= 1, got 0"),
        ({"period": 2.5}, "period must be a whole number of steps >= 1, got 2.5"),
        ({"rate": 0}, "rate must be a number > 0, got 0"),
        ({"rate": float("nan")}, "rate must be a number > 0, got nan"),
        ({"rate": float("inf")}, "rate must be a number > 0, got inf"),
        ({"rate": True}, "rate must be a number > 0, got True"),
        ({"scale_by_staleness": 1}, "scale_by_staleness must be a bool, got 1"),
        ({"barrier": "ssp"}, r"barrier must be ASP\(\), .* got 'ssp'"),
        ({"barrier": SSP}, r"barrier must be ASP\(\), .* got <class"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AsynchronousSGD(**arguments)
