"""Three workers with rows of 0 and one, three times as slow, with rows of 1: the mean is 0.25."""

from __future__ import annotations

from typing import Any

import pytest
from every_row import every
from speeds import Speeds

from sparkdl.strategies import (
    PBSP,
    SSP,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    DelayedNesterov,
    ElasticAveraging,
    GossipAveraging,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    Softsync,
    Strategy,
)

GOALS, SECONDS, STEPS = (0.0, 0.0, 0.0, 1.0), (1.0, 1.0, 1.0, 3.0), 40
SLOW_MOMENTUM = OuterSGD(1, 0.5)


def averaging(**options: Any) -> ParameterAveraging:
    return ParameterAveraging(2, average_optimizer_state=False, **options)


def ends_at(strategy: Strategy[Any], rate: float) -> float:
    run = Speeds(strategy, GOALS, (STEPS,) * 4, SECONDS, rate=rate)
    return run.run(epochs=int(5 / (rate * STEPS)), start=0.5).theta[-1]


BY_SHARE = [
    averaging(cutoff=1),
    averaging(cutoff=2),
    averaging(cutoff="predicted"),
    OuterOptimizer(2, SLOW_MOMENTUM, cutoff=1),
    OuterOptimizer(2, SLOW_MOMENTUM, cutoff="predicted"),
    AsynchronousSGD(2),
    AsynchronousSGD(2, barrier=SSP(2)),
    AsynchronousSGD(2, barrier=PBSP(1)),
    AsynchronousSGD(2, barrier=Softsync(2)),
    AsynchronousOuterOptimizer(DelayedNesterov(4), 2),
]


@every("strategy", BY_SHARE)
def test_a_slow_workers_rows_count_as_much_as_any_others(strategy: Strategy[Any]) -> None:
    """Steps are small enough for the order of an epoch's windows not to matter."""
    assert ends_at(strategy, rate=0.005) == pytest.approx(0.25, abs=0.03)


@every("strategy", [averaging(), OuterOptimizer(2, SLOW_MOMENTUM)])
def test_with_everyone_in_each_round_they_do_at_any_rate(strategy: Strategy[Any]) -> None:
    for rate in (0.005, 0.05):
        assert ends_at(strategy, rate) == pytest.approx(0.25, abs=0.005)


def test_with_large_steps_the_center_has_last_seen_the_slow_one_unless_a_bound_holds() -> None:
    """As strategy-cutoff.md says, with its figures."""
    rate = 1 / STEPS
    assert ends_at(averaging(cutoff=1), rate) == pytest.approx(0.33, abs=0.01)
    assert ends_at(AsynchronousSGD(2), rate) == pytest.approx(0.32, abs=0.01)
    assert ends_at(OuterOptimizer(2, SLOW_MOMENTUM, cutoff=1), rate) == pytest.approx(
        0.40, abs=0.01
    )
    assert ends_at(AsynchronousSGD(2, barrier=SSP(1)), rate) == pytest.approx(0.26, abs=0.01)


def test_scaled_by_staleness_the_slow_one_counts_several_times() -> None:
    """As notes/strategies.md says of Zhang et al.'s rule."""
    strategy = AsynchronousSGD(2, scale_by_staleness=True)
    assert ends_at(strategy, rate=0.005) == pytest.approx(0.45, abs=0.01)
    assert ends_at(strategy, rate=1 / STEPS) == pytest.approx(0.61, abs=0.01)


def test_an_elastic_center_is_nearer_to_a_slow_worker_and_gossip_is_not() -> None:
    """As strategy-elastic.md says, with its figures."""
    elastic = ElasticAveraging(2, mode="asynchronous")
    assert ends_at(elastic, rate=0.005) == pytest.approx(0.35, abs=0.01)
    assert ends_at(elastic, rate=0.05) == pytest.approx(0.45, abs=0.01)
    assert ends_at(GossipAveraging(2), rate=0.005) == pytest.approx(0.25, abs=0.01)


@every("strategy", BY_SHARE[:-1])
def test_an_epoch_has_as_many_full_rounds_as_windows_however_it_is_divided(
    strategy: Strategy[Any],
) -> None:
    """Also where rows are unequal; the first epoch does not know yet who has how many."""
    run = Speeds(strategy, GOALS, (12, 40, 9, 40), SECONDS).run(1)
    first = len(run.contributions)
    rounds = Speeds(strategy, GOALS, (12, 40, 9, 40), SECONDS).run(2).contributions[first:]
    assert sum(each.share for each in rounds) == pytest.approx(40 / 2, rel=0.02)
