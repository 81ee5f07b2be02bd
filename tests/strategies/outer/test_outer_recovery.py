"""OuterOptimizer through lost workers, checkpoints and every schedule of the simulation."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import pytest
import torch
from interruptions import same_bits
from misbehaving import KillsOnce, die_after, kill_once, resume_after
from outer import (
    ADAGRAD,
    ADAM,
    DATA,
    MOMENTUM,
    SGD,
    STRATEGY,
    job,
    named,
)
from support.replay import recorded_commits, relative_difference, replay
from torch import Tensor

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError
from sparkdl.feed.feed import FeedOptions
from sparkdl.strategies import (
    OuterSGD,
)
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(misbehaving)


@pytest.mark.parametrize(
    ("inner_state", "inner", "windows"),
    [
        ("keep", SGD, 20),
        ("keep", MOMENTUM, 4),
        ("keep", ADAM, 14),
        ("average", ADAM, 20),
        ("reset", ADAGRAD, 14),
    ],
    ids=named,
)
def test_resumed_it_ends_in_the_same_bits(
    tmp_path: Path, inner_state: Any, inner: Any, windows: int
) -> None:
    strategy = dataclasses.replace(STRATEGY, inner_state=inner_state)
    given = job(strategy=strategy, optimizer=inner)
    whole = run_world(given, DATA.shards())
    assert same_bits(resume_after(windows, given, DATA.shards(), tmp_path), whole)


@pytest.mark.parametrize(
    ("changes", "was"),
    [
        ({"outer": OuterSGD(0.7, 0.5, nesterov=False)}, "momentum=0.6"),
        ({"period": ((1, 2), (3, 4))}, "period=2"),
        ({"inner_state": "reset"}, "inner_state='keep'"),
    ],
)
def test_with_other_settings_a_checkpoint_is_refused(
    tmp_path: Path, changes: dict[str, Any], was: str
) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(14, job(), DATA.shards(), policy)
    other = job(strategy=dataclasses.replace(STRATEGY, **changes))
    with pytest.raises(ConfigError, match=rf"strategy: was OuterOptimizer\(.*{re.escape(was)}"):
        run_world(other, DATA.shards(), checkpoints=policy)


class SlowMomentum:
    """The oracle of the center's update, in float64 numpy."""

    def __init__(self) -> None:
        self.velocity: list[np.ndarray] = []

    def move(self, center: list[Tensor], mean: list[Tensor]) -> list[Tensor]:
        old = [values.double().numpy().copy() for values in center]
        changes = [new.double().numpy() - values for new, values in zip(mean, old, strict=True)]
        before = self.velocity or [np.zeros_like(change) for change in changes]
        self.velocity = [0.6 * v + c for v, c in zip(before, changes, strict=True)]
        return [torch.from_numpy(o + 0.7 * v) for o, v in zip(old, self.velocity, strict=True)]


def test_a_killed_worker_comes_back_and_the_center_is_what_was_committed(tmp_path: Path) -> None:
    killed = job(KillsOnce(tmp_path, after=12))
    with recorded_commits() as commits:
        outcome = kill_once(killed, DATA.shards())
    oracle = replay(job(), DATA.shards(), commits, SlowMomentum().move)
    assert relative_difference(outcome.module.get_submodule("net"), oracle) < 1e-12


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("inner_state", "inner"),
    [("keep", SGD), ("reset", MOMENTUM), ("average", MOMENTUM)],
    ids=named,
)
def test_when_all_start_again_the_velocity_goes_on(
    tmp_path: Path, inner_state: Any, inner: Any
) -> None:
    """Workers that reshuffle their rows cannot be replaced one by one."""
    given = {
        "feed": FeedOptions(reshuffle_every=1),
        "strategy": dataclasses.replace(STRATEGY, inner_state=inner_state),
        "optimizer": inner,
    }
    whole = run_world(job(**given), DATA.shards(), ranks_as="processes")
    killed = job(KillsOnce(tmp_path, after=12), **given)
    outcome = kill_once(killed, DATA.shards())
    assert same_bits(outcome, whole)
