"""Strategies whose rounds are cut off: the center is what the commits give, and no row is lost."""

from __future__ import annotations

from functools import partial

import torch
import trainings
from recorded import recorded_decisions
from replayed import ByHand
from toys import relative_error
from trainings import DATA, SIZES

from sparkdl.averager.policies.round_policy import All
from sparkdl.averager.values.center import Center
from sparkdl.averager.values.center_update import Contributions
from sparkdl.protocols import Segment
from sparkdl.strategies import FullPrecision, OuterOptimizer, ParameterAveraging, ParameterChanges
from sparkdl.testing import run_world

STRATEGY = ParameterAveraging(2, average_optimizer_state=False, cutoff=1)


job = partial(trainings.job, strategy=STRATEGY)


def test_the_center_moves_by_the_mean_change_whenever_contributions_began() -> None:
    with recorded_decisions() as decisions:
        outcome = run_world(job(), DATA.shards())
    assert relative_error(outcome.module, ByHand(DATA).follow(decisions)) < 1e-9
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    # The third of three is left out of the first round.
    assert outcome.history[0].max_staleness > 0
    assert outcome.history[-1].loss < outcome.history[0].loss


def test_late_parameters_count_as_changes_and_all_else_as_values() -> None:
    kinds = ("parameters", "buffers", "optimizer")
    layout = tuple(Segment(kind, torch.float32, 1) for kind in kinds)
    wire_format = ParameterChanges()
    center = Center(layout, [torch.tensor([10.0]) for _ in kinds], 2, wire_format)
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
        assert type(strategy.wire_format) is FullPrecision
