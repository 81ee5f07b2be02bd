"""An asynchronous strategy of one's own, in one file: nobody waits, stale changes count less."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asynchronous_sgd
import cloudpickle
import misbehaving
import pytest
import torch
from asynchronous_sgd import AsynchronousSGD
from misbehaving import KillsOnce, die_after
from simulated import Oracle, simulated
from torch import Tensor, nn
from toys import (
    batches_by_hand,
    classification,
    make_job,
    mlp,
    relative_error,
    sgd_on_union,
)

from sparkdl.averager import events as on
from sparkdl.averager.coordinator import Coordinator
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.events import WindowReport
from sparkdl.strategies import Contributions
from sparkdl.testing import run_world
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(asynchronous_sgd)
cloudpickle.register_pickle_by_value(misbehaving)

SIZES = [40, 33, 21]
DATA = classification(SIZES)
STRATEGY = AsynchronousSGD(period=2, rate=0.8)


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    settings = {"strategy": STRATEGY, "epochs": 3, "max_failures": 1, **changes}
    return make_job(model or mlp(), **settings)


@contextmanager
def recorded_decisions() -> Iterator[list[on.Decision]]:
    """Take down what the runs of this process decide meanwhile."""
    decided: list[on.Decision] = []
    handle = Coordinator.handle

    def recording(self: Coordinator, event: on.Event, now: float) -> list[on.Decision]:
        decisions = handle(self, event, now)
        decided.extend(decisions)
        return decisions

    Coordinator.handle = recording  # type: ignore[method-assign]
    try:
        yield decided
    finally:
        Coordinator.handle = handle  # type: ignore[method-assign]


def by_hand(decisions: list[on.Decision]) -> nn.Module:
    """What was decided, done in plain torch: each window from the center that its rank was sent."""
    module, optimizer = mlp().train(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    center = [p.detach().clone() for p in module.parameters()]
    sent: dict[int, tuple[list[Tensor], int]] = {}
    steps, updates = dict.fromkeys(range(len(SIZES)), 0), 0
    for decision in decisions:
        if isinstance(decision, (on.Welcome, on.Reply)):
            sent[decision.member.rank] = [values.clone() for values in center], updates
        elif isinstance(decision, on.Report) and isinstance(decision.event, WindowReport):
            window = decision.event
            began, since = sent[window.rank]
            with torch.no_grad():
                for parameter, values in zip(module.parameters(), began, strict=True):
                    parameter.copy_(values)
            plan = batches_by_hand(DATA, window.rank, window.epoch, 4)
            for features, targets in plan[steps[window.rank] : window.step_of_epoch]:
                one = optimizer(module)
                one.zero_grad()
                outputs = module(torch.from_numpy(features))
                nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
                one.step()
            for values, start, mine in zip(center, began, module.parameters(), strict=True):
                values += (mine.detach() - start) * (0.8 / (1 + updates - since))
            updates += bool(window.examples)
            steps[window.rank] = 0 if window.last else window.step_of_epoch
    with torch.no_grad():
        for parameter, values in zip(module.parameters(), center, strict=True):
            parameter.copy_(values)
    return module


def test_the_center_is_what_the_decisions_say() -> None:
    with recorded_decisions() as decisions:
        outcome = run_world(job(), DATA.shards())
    stale = [each.contributions.staleness for each in decisions if isinstance(each, on.Commit)]
    assert max(stale) > 0
    assert relative_error(outcome.module, by_hand(decisions)) < 1e-9
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    assert outcome.history[-1].loss < outcome.history[0].loss


def test_alone_it_is_sgd() -> None:
    data = classification([41])
    outcome = run_world(job(strategy=AsynchronousSGD(period=2)), data.shards())
    oracle = sgd_on_union(mlp(), data, lr=0.1, epochs=3, batch_size=4, dtype=torch.float64)
    assert relative_error(outcome.module, oracle) < 1e-9


def test_a_killed_worker_comes_back_and_no_row_is_lost_or_counted_twice(tmp_path: Path) -> None:
    with recorded_decisions() as decisions:
        outcome = run_world(job(KillsOnce(tmp_path, 12)), DATA.shards(), ranks_as="processes")
    assert len(os.listdir(tmp_path)) > 12
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    trained = outcome.module.get_submodule("net")
    assert relative_error(trained, by_hand(decisions)) < 1e-9


@pytest.mark.parametrize("windows", [4, 14])
def test_a_resumed_training_goes_on_where_each_worker_was(tmp_path: Path, windows: int) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(windows, job(), DATA.shards(), policy)
    resumed: list[object] = []
    outcome = run_world(job(), DATA.shards(), checkpoints=policy, on_event=resumed.append)
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    again = sum(event.examples for event in resumed if isinstance(event, WindowReport))
    assert 0 < again < 3 * sum(SIZES)
    assert outcome.history[-1].loss < outcome.history[0].loss


def scaled_by_hand() -> Oracle:
    """The update once more, for one number."""

    def move(
        center: float,
        contributions: Contributions,
        values: Mapping[int, float],
        begun: Mapping[int, float],
    ) -> float:
        ((rank, value),) = values.items()
        return center + 0.8 * (value - begun[rank]) / (1 + contributions.staleness)

    return move


@pytest.mark.usefixtures("quiet")
def test_every_schedule_ends_with_the_center_that_its_commits_give() -> None:
    outcomes = simulated(STRATEGY, scaled_by_hand, range(400))
    assert sum(outcome.failure is None for outcome in outcomes) > 300
    assert sum(outcome.losses for outcome in outcomes) > 100
