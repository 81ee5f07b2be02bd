"""Strategies whose rounds are cut off: the center is what the commits give, and no row is lost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import pytest
import torch
from misbehaving import KillsOnce, kill_once, resume_after
from recorded import recorded_decisions
from replayed import ByHand, HeavyBall
from torch import nn
from toys import classification, make_job, mlp, relative_error, sgd_on_union

from sparkdl.averager.policies.round_policy import All
from sparkdl.averager.values.center import Center
from sparkdl.averager.values.center_update import Contributions
from sparkdl.checkpoint.object_spec import load_object, save_object
from sparkdl.errors import ConfigError
from sparkdl.estimator.persistence import EXPECTED
from sparkdl.protocols import Segment
from sparkdl.strategies import (
    FullPrecision,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    ParameterChanges,
    Strategy,
)
from sparkdl.testing import run_world
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(misbehaving)

SIZES = [40, 33, 21]
DATA = classification(SIZES)
STRATEGY = ParameterAveraging(2, average_optimizer_state=False, cutoff=1)
PREDICTED = ParameterAveraging(2, cutoff="predicted")
OUTER = OuterOptimizer(2, OuterSGD(0.7, 0.5, nesterov=False), cutoff=1)


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    settings = {"strategy": STRATEGY, "epochs": 3, "max_failures": 1, **changes}
    return make_job(model or mlp(), **settings)


def test_the_center_moves_by_the_mean_change_whenever_contributions_began() -> None:
    with recorded_decisions() as decisions:
        outcome = run_world(job(), DATA.shards())
    assert relative_error(outcome.module, ByHand(DATA).follow(decisions)) < 1e-9
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    # The third of three is left out of the first round.
    assert outcome.history[0].max_staleness > 0
    assert outcome.history[-1].loss < outcome.history[0].loss


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.net = mlp()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net(self.norm(features))
        return outputs


@pytest.mark.parametrize("inner", [torch.optim.Adam, torch.optim.Adagrad])
def test_alone_it_is_the_same_as_without_buffers_and_optimizer_included(inner: Any) -> None:
    data = classification([42])
    settings = {"optimizer": partial(inner, lr=0.01), "epochs": 2}
    ends = [
        run_world(make_job(Normalized(), strategy=strategy, **settings), data.shards())
        for strategy in (ParameterAveraging(2, cutoff=1), ParameterAveraging(2))
    ]
    assert relative_error(ends[0].module, ends[1].module) < 1e-9


def test_alone_it_is_sgd() -> None:
    data = classification([41])
    outcome = run_world(job(), data.shards())
    oracle = sgd_on_union(mlp(), data, lr=0.1, epochs=3, batch_size=4, dtype=torch.float64)
    assert relative_error(outcome.module, oracle) < 1e-9


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


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("strategy", "by_hand"),
    [
        (PREDICTED, ByHand),
        (STRATEGY, ByHand),
        (OUTER, partial(HeavyBall, rate=0.7, momentum=0.5)),
        (replace(OUTER, cutoff="predicted"), partial(HeavyBall, rate=0.7, momentum=0.5)),
    ],
    ids=["averaging predicted", "averaging", "outer", "outer predicted"],
)
def test_a_killed_worker_comes_back_to_the_center_that_the_commits_give(
    strategy: Strategy[Any], by_hand: Any, tmp_path: Path
) -> None:
    killed = job(KillsOnce(tmp_path, 12), strategy=strategy)
    with recorded_decisions() as decisions:
        outcome = kill_once(killed, DATA.shards())
    trained = outcome.module.get_submodule("net")
    assert relative_error(trained, by_hand(DATA).follow(decisions)) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "windows"),
    [(STRATEGY, 14), (OUTER, 4), (PREDICTED, 14), (replace(OUTER, cutoff="predicted"), 20)],
    ids=["averaging", "outer", "averaging predicted", "outer predicted"],
)
def test_a_resumed_training_goes_on_where_each_worker_was(
    strategy: Strategy[Any], windows: int, tmp_path: Path
) -> None:
    going = job(strategy=strategy)
    outcome = resume_after(windows, going, DATA.shards(), tmp_path)
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    assert outcome.history[-1].loss < outcome.history[0].loss


def test_without_a_cutoff_everyone_is_in_every_round_and_values_travel() -> None:
    for strategy in (ParameterAveraging(), OuterOptimizer()):
        assert type(strategy.round_policy) is All
        assert type(strategy.wire_format) is FullPrecision


@pytest.mark.parametrize("strategy", [STRATEGY, OUTER, PREDICTED], ids=str)
def test_it_is_saved_and_loaded_without_trust(strategy: Strategy[Any], tmp_path: Path) -> None:
    spec = save_object(strategy, tmp_path, "strategy")
    expected = EXPECTED["strategy"]
    assert load_object(spec, tmp_path, "strategy", expected=expected, trust=False) == strategy


@pytest.mark.parametrize("kind", [ParameterAveraging, OuterOptimizer])
@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None, "all", "1"])
def test_a_cutoff_that_makes_no_sense_is_refused(kind: Any, wrong: object) -> None:
    with pytest.raises(ConfigError, match=f"cutoff must be 'none', .*, got {wrong!r}"):
        kind(cutoff=wrong)


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        (ParameterAveraging, {"aggregation": "executors"}, "aggregation='executors'"),
        (ParameterAveraging, {"aggregation": "hierarchical"}, "aggregation='hierarchical'"),
        (ParameterAveraging, {"wire_dtype": "bfloat16"}, "wire_dtype='bfloat16'"),
        (OuterOptimizer, {"wire_dtype": "float8"}, "wire_dtype='float8'"),
        (OuterOptimizer, {"fragments": 2}, "fragments, overlap or merge"),
        (OuterOptimizer, {"overlap": 2}, "fragments, overlap or merge"),
    ],
)
def test_what_needs_everyone_is_refused_beside_a_cutoff(
    kind: Any, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{named} needs every worker in every round"):
        kind(cutoff=1, **arguments)
