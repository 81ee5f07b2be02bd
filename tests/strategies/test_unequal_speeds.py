"""Workers of unequal speed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import trainings
from by_keyword import center_of
from every_row import every
from replayed import ByHand, recorded_decisions
from speeds import Speeds
from toys import relative_error
from trainings import DATA, SIZES

from sparkdl.averager.policies.round_policy import All
from sparkdl.averager.values.center_update import Contributions
from sparkdl.protocols import Segment
from sparkdl.strategies import (
    FULL_PRECISION,
    PARAMETER_CHANGES,
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
from sparkdl.testing import run_world

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
    """As averaging.md#stragglers-cut-off says, with its figures."""
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
    """As averaging.md#elastic-averaging says, with its figures."""
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


STRATEGY = ParameterAveraging(2, average_optimizer_state=False, cutoff=1)


job = partial(trainings.job, strategy=STRATEGY)


def test_the_center_moves_by_the_mean_change_whenever_contributions_began() -> None:
    with recorded_decisions() as decisions:
        outcome = run_world(job(), DATA.shards())
    assert relative_error(outcome.module, ByHand(DATA).follow(decisions)) < 1e-9
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    # The third of three is left out of the first round.
    assert outcome.history[0].max_staleness > 0


def test_late_parameters_count_as_changes_and_all_else_as_values() -> None:
    kinds = ("parameters", "buffers", "optimizer")
    layout = tuple(Segment(kind, torch.float32, 1) for kind in kinds)
    wire_format = PARAMETER_CHANGES
    center = center_of(layout, [torch.tensor([10.0]) for _ in kinds], 2, wire_format)
    # Rank 0 began at 10; rank 1 before, when all were 50, and has come to 47 and 44, 3 rows' worth.
    trained, begun, rows = (12.0, 44.0), (10.0, 50.0), (1, 3)
    total = center.open_sum([0, 1])
    for rank in (0, 1):
        total.declare(rank, rows[rank])
        for index, segment in enumerate(layout):
            value, base = torch.tensor([trained[rank]]), torch.tensor([begun[rank]])
            encoded = wire_format.encode(value, base, segment)
            total.add(rank, index, wire_format.contribution(segment).pack(encoded))
    center.commit(Contributions(rows, 2, 1))
    assert [values.item() for values in center.values] == [
        10 + (1 * 2 + 3 * -6) / 4,
        (1 * 12 + 3 * 44) / 4,
        (1 * 12 + 3 * 44) / 4,
    ]


def test_without_a_cutoff_everyone_is_in_every_round_and_values_travel() -> None:
    for strategy in (ParameterAveraging(), OuterOptimizer()):
        assert type(strategy.round_policy) is All
        assert strategy.wire_format is FULL_PRECISION
