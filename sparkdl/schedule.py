"""Learning rates that change while training goes on, by torch's own schedulers.

Where a schedule stands follows from where the training stands, and from nothing else: so a worker
that comes back, or goes on from a checkpoint, takes it to that place step by step, and every worker
has the same learning rate at the start of an epoch, whatever the number of its rows.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparkdl.errors import ConfigError
from sparkdl.protocols import SchedulerBuilder

Unit = Literal["step", "epoch"]


class Schedule:
    """The schedule of one optimizer, which can be taken to any place of the training.

    Args:
        optimizer: whose hyperparameters it changes.
        build: makes torch's scheduler; None for hyperparameters that stay.
        every: after what it takes a step of its own.

    Raises:
        ConfigError: what ``build`` makes is no scheduler, or one that wants to be told a metric.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, build: SchedulerBuilder | None, every: Unit
    ) -> None:
        self._optimizer = optimizer
        self._build = build
        self._every = every
        self._initial = copy.deepcopy([_hyperparameters(g) for g in optimizer.param_groups])
        self._steps = 0
        self._scheduler = None if build is None else _checked(build(optimizer))

    @property
    def steps(self) -> int:
        """How many it has taken."""
        return self._steps

    def start_at(self, epoch: int, steps: int) -> None:
        """Set the hyperparameters that belong to a place of the training.

        Args:
            epoch: counted from 1.
            steps: optimizer steps since the start of the training: in the epochs before, those of
                the worker with the most rows.
        """
        self._go_to(steps if self._every == "step" else epoch - 1)

    def go_back(self, steps: int) -> None:
        """Set the hyperparameters that belong to the step where it stands, or to one before that.

        Args:
            steps: how many it had taken.

        Raises:
            ValueError: it was not there.
        """
        if not isinstance(steps, int) or not 0 <= steps <= self._steps:
            raise ValueError(f"a schedule that has taken {self._steps} steps stood at {steps!r}")
        self._go_to(steps)

    def after_step(self) -> None:
        """Take note of an optimizer step."""
        if self._scheduler is not None and self._every == "step":
            self._scheduler.step()
            self._steps += 1

    def describe(self) -> list[Any] | None:
        """What tells it from another one, as JSON; None if there is none."""
        if self._scheduler is None:
            return None
        # Other state may be objects, whose text is not the same in every process.
        numbers = {
            key: value
            for key, value in self._scheduler.state_dict().items()
            if isinstance(value, (int, float, str))
        }
        return [type(self._scheduler).__name__, self._every, numbers]

    def _go_to(self, steps: int) -> None:
        if self._build is None:
            return
        if steps < self._steps:
            for group, initial in zip(self._optimizer.param_groups, self._initial, strict=True):
                for key in _hyperparameters(group).keys() - initial.keys():
                    del group[key]
                group.update(copy.deepcopy(initial))
            self._scheduler = self._build(self._optimizer)
            self._steps = 0
        assert self._scheduler is not None
        with warnings.catch_warnings():
            # A worker that has no rows, or has just started, may not have stepped its optimizer.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while self._steps < steps:
                self._scheduler.step()
                self._steps += 1


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _checked(scheduler: object) -> LRScheduler:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau wants to be told a metric at each of its steps. Give a scheduler "
            "that follows from the number of steps, for example CosineAnnealingLR"
        )
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            "the scheduler must be a function optimizer -> torch.optim.lr_scheduler.LRScheduler, "
            f"but it returned a {type(scheduler).__name__}"
        )
    return scheduler
