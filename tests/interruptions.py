"""Trainings that are interrupted behind a commit, and what compares them with one that was not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from by_keyword import run
from decided import Told, do, told
from toys import Data

from sparkdl.averager import Averager
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome
from sparkdl.errors import TrainingError
from sparkdl.events import WindowReport
from sparkdl.testing import _threads
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


@contextmanager
def dying_after(windows: int) -> Iterator[Callable[[object], None]]:
    """What the driver calls with its events, and dies of once so many windows were committed.

    From then on, nothing else is decided than that the run fails: workers cannot get further while
    the driver has yet to hear of it, so what is left to train does not depend on whose turn it is.
    """
    decide = Averager._decide
    committed = heard = 0

    def decide_until_then(self: Averager, event: Any, *arguments: Any, **options: Any) -> None:
        nonlocal committed
        if committed > windows and event.__name__ != "fail":
            return
        decide(self, event, *arguments, **options)
        committed += sum(map(tells_of_a_window, told(self.coordinator.do.decisions)))

    def on_event(event: object) -> None:
        nonlocal heard
        heard += isinstance(event, WindowReport)
        if heard > windows:
            raise Interrupted

    Averager._decide = decide_until_then  # type: ignore[method-assign]
    try:
        yield on_event
    finally:
        Averager._decide = decide  # type: ignore[method-assign]


def tells_of_a_window(decision: Told) -> bool:
    return isinstance(decision, do.report) and isinstance(decision.event, WindowReport)


def die_after(
    job: Job, data: Data, path: Path, windows: int, launch: Any = _threads, **changes: Any
) -> bool:
    """Run until so many windows were committed; returns whether it came that far."""
    shards = data.shards()
    start = launch(job, shards, path.parent)
    with dying_after(windows) as on_event:
        try:
            run(job, len(shards), start, checkpoints=policy(path, **changes), on_event=on_event)
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
