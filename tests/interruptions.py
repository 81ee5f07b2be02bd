"""Trainings that are interrupted behind a commit, and what compares them with one that was not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from toys import Data

from sparkdl.averager import Averager
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome, run
from sparkdl.errors import TrainingError
from sparkdl.events import WindowReport
from sparkdl.testing.world import _threads
from sparkdl.worker import Job


class Interrupted(Exception):
    """The driver dies."""


class AskedToStop(TrainingError):
    """The driver is told to stop."""


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01),
}


def policy(path: Path, **changes: Any) -> CheckpointPolicy:
    return CheckpointPolicy(path=str(path), **changes)


def same_bits(first: Outcome, second: Outcome) -> bool:
    """Whether two trainings came to exactly the same model."""
    states = (outcome.module.state_dict().values() for outcome in (first, second))
    return all(torch.equal(mine, other) for mine, other in zip(*states, strict=True))


def dying_after(windows: int) -> Callable[[object], None]:
    """What the driver calls with its events, and dies of once so many windows were committed."""
    seen = 0

    def on_event(event: object) -> None:
        nonlocal seen
        seen += isinstance(event, WindowReport)
        if seen > windows:
            raise Interrupted

    return on_event


def die_after(
    job: Job, data: Data, path: Path, windows: int, launch: Any = _threads, **changes: Any
) -> bool:
    """Run until so many windows were committed; returns whether it came that far."""
    shards = data.shards()
    try:
        run(
            job,
            len(shards),
            launch(job, shards, path.parent),
            checkpoints=policy(path, **changes),
            on_event=dying_after(windows),
        )
    except Interrupted:
        return True
    return False


def save_and_stop(
    job: Job, data: Data, path: Path, windows: int, launch: Any = _threads, **changes: Any
) -> bool:
    """Run until so many windows were committed, then ask for a checkpoint behind the next."""
    seen = 0
    averagers: list[Averager] = []
    shards = data.shards()
    start = launch(job, shards, path.parent)

    def noting(averager: Averager) -> Any:
        averagers.append(averager)
        return start(averager)

    def on_event(event: object) -> None:
        nonlocal seen
        seen += isinstance(event, WindowReport)
        if seen == windows + 1:
            averagers[0].save_and_fail(AskedToStop())

    try:
        run(job, len(shards), noting, checkpoints=policy(path, **changes), on_event=on_event)
    except AskedToStop:
        return True
    return False
