"""A synchronous strategy of one's own, in one file: the center has momentum."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import outer_momentum
import pytest
import torch
from misbehaving import KillsOnce, die_after
from outer_momentum import OuterMomentum
from simulated import Oracle, simulated
from torch import Tensor, nn
from toys import batches_by_hand, classification, make_job, mlp, parameters_of, relative_error

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome
from sparkdl.errors import ConfigError
from sparkdl.feed.feed import FeedOptions
from sparkdl.strategies import Contributions, ParameterAveraging
from sparkdl.testing import run_world
from sparkdl.testing.replay import recorded_commits, relative_difference, replay
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(outer_momentum)
cloudpickle.register_pickle_by_value(misbehaving)

SIZES = [40, 33, 21]
DATA = classification(SIZES)
STRATEGY = OuterMomentum(period=2, momentum=0.6, rate=0.7)


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    settings = {"strategy": STRATEGY, "epochs": 3, "max_failures": 1, **changes}
    return make_job(model or mlp(), **settings)


def same_bits(first: Outcome, second: Outcome) -> bool:
    pairs = zip(first.module.parameters(), second.module.parameters(), strict=True)
    return all(torch.equal(mine, other) for mine, other in pairs)


class Momentum:
    """The oracle of the center's update, in float64 numpy."""

    def __init__(self) -> None:
        self.velocity: list[np.ndarray] = []

    def move(self, center: list[Tensor], mean: list[Tensor]) -> list[Tensor]:
        old = [values.double().numpy().copy() for values in center]
        changes = [new.double().numpy() - values for new, values in zip(mean, old, strict=True)]
        before = self.velocity or [np.zeros_like(change) for change in changes]
        self.velocity = [0.6 * v + c for v, c in zip(before, changes, strict=True)]
        return [torch.from_numpy(o + 0.7 * v) for o, v in zip(old, self.velocity, strict=True)]


def by_hand(epochs: int) -> nn.Module:
    """Plain torch in one process."""
    center, momentum = mlp().train(), Momentum()
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(DATA, rank, epoch, 4) for rank in range(3)]
        for start in range(0, max(map(len, plans)), 2):
            replicas, weights = [], []
            for plan in plans:
                if window := plan[start : start + 2]:
                    replicas.append(copy.deepcopy(center))
                    optimizer = torch.optim.SGD(replicas[-1].parameters(), lr=0.1)
                    weights.append(sum(len(targets) for _, targets in window))
                    for features, targets in window:
                        optimizer.zero_grad()
                        outputs = replicas[-1](torch.from_numpy(features))
                        nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
                        optimizer.step()
            mine = [list(parameters_of(replica).values()) for replica in replicas]
            mean = [
                torch.from_numpy(np.average(values, axis=0, weights=weights))
                for values in zip(*mine, strict=True)
            ]
            parameters = list(center.parameters())
            moved = momentum.move([p.detach() for p in parameters], mean)
            with torch.no_grad():
                for parameter, values in zip(parameters, moved, strict=True):
                    parameter.copy_(values)
    return center


def test_it_is_slow_momentum() -> None:
    outcome = run_world(job(), DATA.shards())
    assert relative_error(outcome.module, by_hand(epochs=3)) < 1e-12


def test_without_momentum_it_is_parameter_averaging() -> None:
    plain = run_world(job(strategy=OuterMomentum(2, momentum=0.0, rate=1.0)), DATA.shards())
    averaging = ParameterAveraging(2, average_optimizer_state=False)
    average = run_world(job(strategy=averaging), DATA.shards())
    assert relative_error(plain.module, average.module) < 1e-12


@pytest.mark.parametrize("windows", [4, 14, 20])
def test_resumed_it_ends_in_the_same_bits(tmp_path: Path, windows: int) -> None:
    whole = run_world(job(), DATA.shards())
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(windows, job(), DATA.shards(), policy)
    assert same_bits(run_world(job(), DATA.shards(), checkpoints=policy), whole)


def test_with_another_momentum_a_checkpoint_is_refused(tmp_path: Path) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(14, job(), DATA.shards(), policy)
    other = job(strategy=OuterMomentum(period=2, momentum=0.5, rate=0.7))
    with pytest.raises(ConfigError, match=r"strategy: was OuterMomentum\(.*momentum=0.6"):
        run_world(other, DATA.shards(), checkpoints=policy)


def test_a_killed_worker_comes_back_and_the_center_is_what_was_committed(tmp_path: Path) -> None:
    killed = job(KillsOnce(tmp_path, after=12))
    with recorded_commits() as commits:
        outcome = run_world(killed, DATA.shards(), ranks_as="processes")
    assert len(os.listdir(tmp_path)) > 12
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    oracle = replay(job(), DATA.shards(), commits, Momentum().move)
    assert relative_difference(outcome.module.get_submodule("net"), oracle) < 1e-12


def test_when_all_start_again_the_velocity_goes_on(tmp_path: Path) -> None:
    """Workers that deal their rows anew cannot be replaced one by one."""
    options = FeedOptions(reshuffle_every=1)
    whole = run_world(job(feed=options), DATA.shards(), ranks_as="processes")
    killed = job(KillsOnce(tmp_path, after=12), feed=options)
    outcome = run_world(killed, DATA.shards(), ranks_as="processes")
    assert len(os.listdir(tmp_path)) > 12
    assert same_bits(outcome, whole)


def test_the_documentation_shows_this_strategy() -> None:
    source = Path(outer_momentum.__file__).read_text()
    page = Path(__file__).parents[2] / "docs" / "strategies.md"
    (shown,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert shown in source


def velocity_by_hand() -> Oracle:
    """The update once more, for one number."""
    velocity = 0.0

    def move(
        center: float,
        contributions: Contributions,
        values: Mapping[int, float],
        begun: Mapping[int, float],
    ) -> float:
        nonlocal velocity
        assert {begun[rank] for rank in values} == {center}
        total = sum(w * v for w, v in zip(contributions.weights, values.values(), strict=True))
        velocity = 0.6 * velocity + total / sum(contributions.weights) - center
        return center + 0.7 * velocity

    return move


@pytest.mark.usefixtures("quiet")
def test_every_schedule_ends_with_the_center_that_its_commits_give() -> None:
    outcomes = simulated(STRATEGY, velocity_by_hand, range(400))
    assert sum(outcome.failure is None for outcome in outcomes) > 300
    assert sum(outcome.losses for outcome in outcomes) > 100
