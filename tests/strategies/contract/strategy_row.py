"""What is known of a strategy where a training is cut short: a row of the table, and oracles."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from by_hand import Springs
from decided import Told
from streams import Outer, OuterAsDecided
from support.replay import replay
from torch import Tensor, nn
from toys import Data, classification, make_job, mlp, relative_error
from trainings import DATA, SGD

from sparkdl.feed.feed import FeedOptions
from sparkdl.strategies import OuterOptimizer, ParameterAveraging, Strategy
from sparkdl.worker import Job

SCHEDULE = {
    "scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.97),
    "scheduler_every": "step",
}


TWO = classification([42, 22])
"""Of batches of 4: 11 and 6 steps an epoch."""


class Noise(nn.Module):
    """Draws from torch, from numpy and from Python."""

    def forward(self, features: Tensor) -> Tensor:
        dropped = nn.functional.dropout(features, 0.5)
        return dropped * np.random.normal(1.0, 0.1) * random.gauss(1.0, 0.1)


def noisy() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), Noise(), nn.Linear(8, 3)).double()


@dataclass(frozen=True)
class Killed:
    """What is known of a center whose worker was killed and came back, while others went on.

    Attributes:
        oracle: what a run's decisions, and its commits, come to.
        within: the relative error.
    """

    oracle: Callable[[list[Told], list[Any]], nn.Module]
    within: float = 1e-9


@dataclass(frozen=True)
class Row:
    """A strategy, and what has to hold of it.

    Attributes:
        name: of its tests.
        strategy: with all its settings.
        settings: other changes of the job.
        model: what is trained where no worker is killed.
        data: the rows.
        ranks_as: what ranks are where nobody is killed.
        every_rounds: how often there is a checkpoint; by default each epoch.
        resumed: interrupted behind so many commits, it ends in the bits of one that was not.
        stopped: the same where it is asked for a checkpoint behind the next, and stops there.
        alone: the same of one worker with 42 rows, for strategies whose order is by chance.
        goes_on: interrupted behind so many commits, each worker's rows count once an epoch.
        killed: what the center is when a killed worker has come back alone; SGD has no settings.
        killed_counts: where no more is known of the center than whose rows it has.
        restarted: all workers start again as one was killed, and it ends in the bits of one where
            none was, with these changes of the job. Where they could come back alone, they
            reshuffle their rows.
        restarted_counts: where the order is by chance.
        twice: two runs end in the same bits.
        killed_after: passes of the killed worker.
        net: layers that are trained where all workers start again.
        backward: whether the worker is killed in backward.
        repeats: passes of the killed worker that are made again, which are those since a commit.
        nightly: which of these, by name, are for the night.
    """

    name: str
    strategy: Strategy[Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = mlp
    data: Data = DATA
    ranks_as: Any = "threads"
    every_rounds: int | None = 1
    resumed: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    goes_on: tuple[int, ...] = ()
    killed: Killed | None = None
    killed_counts: bool = False
    restarted: Mapping[str, Any] | None = None
    restarted_counts: bool = False
    twice: bool = False
    killed_after: int = 12
    net: Callable[[], nn.Sequential] = mlp
    backward: bool = False
    repeats: int | None = None
    nightly: tuple[str, ...] = ()

    def job(self, model: nn.Module | None = None, **changes: Any) -> Job:
        settings = {"epochs": 3, "max_failures": 1, **self.settings, **changes}
        return make_job(model or self.model(), strategy=self.strategy, **settings)

    def starts_all_again(self) -> dict[str, Any]:
        """Changes of the job by which workers cannot be replaced one by one."""
        alone = not self.strategy.needs.collective and "feed" not in self.settings
        return {"feed": FeedOptions(reshuffle_every=1)} if alone else {}


def followed(make: Callable[[], Any], within: float = 1e-9) -> Killed:
    """By an oracle that follows decisions."""
    return Killed(lambda decisions, _: make().follow(decisions), within)


def averaged(data: Data) -> Killed:
    """By what was committed, in windows of 2 steps."""
    job = make_job(mlp(), strategy=ParameterAveraging(2), epochs=3)
    return Killed(lambda _, commits: replay(job, data.shards(), commits))


def on_springs(reads: bool = False) -> Killed:
    return Killed(lambda decisions, _: Springs(0.2, reads=reads).follow(decisions), 1e-11)


class Momentum:
    """Outer momentum in float64 numpy, of which there are two strategies."""

    def __init__(self) -> None:
        self.velocity: list[np.ndarray] = []

    def move(self, center: list[Tensor], mean: list[Tensor]) -> list[Tensor]:
        old = [values.double().numpy().copy() for values in center]
        changes = [new.double().numpy() - values for new, values in zip(mean, old, strict=True)]
        before = self.velocity or [np.zeros_like(change) for change in changes]
        self.velocity = [0.6 * v + c for v, c in zip(before, changes, strict=True)]
        return [torch.from_numpy(o + 0.7 * v) for o, v in zip(old, self.velocity, strict=True)]


def with_momentum(strategy: Strategy[Any]) -> Killed:
    job = make_job(mlp(), strategy=strategy, epochs=3)
    return Killed(
        lambda _, commits: replay(job, DATA.shards(), commits, Momentum().move), within=1e-12
    )


def in_fragments(strategy: OuterOptimizer) -> Killed:
    def follow(decisions: list[Told], _: Any) -> nn.Module:
        oracle = OuterAsDecided(strategy, SGD).follow(decisions)
        undisturbed = Outer(strategy, SGD).train(3)
        assert relative_error(oracle, undisturbed) > 1e-6  # the killed one has cost something
        return oracle

    return Killed(follow, 1e-8)
