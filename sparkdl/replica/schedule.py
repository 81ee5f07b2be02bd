"""Learning rates that change during training, by torch's own schedulers.

A schedule's position follows from the training's position, and from nothing else: a worker that
comes back, or resumes from a checkpoint, takes the schedule there step by step, and all workers
have the same learning rate at the start of an epoch, however many rows they have. For a schedule
that follows the losses of previous epochs, the losses over all workers are part of the position.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparkdl.errors import ConfigError
from sparkdl.protocols import SchedulerBuilder
from sparkdl.replica.optimizer_state import hyperparameters, put_back

Unit = Literal["step", "epoch"]


class Schedule:
    """The schedule of one optimizer, which can be taken to any position in the training.

    Args:
        optimizer: the optimizer whose hyperparameters it changes.
        build: builds torch's scheduler; None for constant hyperparameters.
        unit: what it takes a step after.

    Raises:
        ConfigError: ``build`` does not return a scheduler, or it returns one that follows epochs'
            losses although ``unit`` is a step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, build: SchedulerBuilder | None, unit: Unit
    ) -> None:
        self._optimizer = optimizer
        self._build = build
        self._unit = unit
        self._initial = copy.deepcopy([hyperparameters(g) for g in optimizer.param_groups])
        self._steps = self._lead = 0
        self._losses: Sequence[float] = ()
        self._scheduler = None if build is None else _checked(build(optimizer), unit)

    @property
    def follows_epoch_losses(self) -> bool:
        """Whether its steps depend on the results of previous epochs."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    @property
    def mode(self) -> str | None:
        """For one that follows losses or a metric: ``min`` if smaller is better, else ``max``."""
        followed = self._scheduler if isinstance(self._scheduler, ReduceLROnPlateau) else None
        return None if followed is None else followed.mode

    @property
    def steps(self) -> int:
        """How many steps it has taken."""
        return self._steps

    def lead_to(self, steps: int) -> None:
        """Get ahead of the optimizer, and stay ahead, for strategies whose steps are worth more.

        Args:
            steps: how many it is to have taken; a schedule by the epoch stays where it is.
        """
        if self._scheduler is not None and self._unit == "step":
            self._lead += steps - self._steps
            self._go_to(steps)

    def start_at(self, epoch: int, steps: int, losses: Sequence[float] = ()) -> None:
        """Set the hyperparameters that belong to a position in the training.

        Args:
            epoch: counted from 1.
            steps: optimizer steps since the start of the training; in previous epochs, those of the
                worker with the most rows.
            losses: the loss of each previous epoch, if the schedule follows them.
        """
        self._losses = losses
        self._go_to(steps + self._lead if self._unit == "step" else epoch - 1)

    def stand_at(self, steps: int, *, ahead: int = 0, pace: int = 1) -> None:
        """Set the hyperparameters that belong to its present step, or to an earlier one.

        Args:
            steps: how many steps it had taken.
            ahead: by how much ``steps`` may exceed what it has taken.
            pace: if above 1, ``steps`` may be this many times as large, and the schedule stays that
                far ahead of the optimizer.

        Raises:
            ValueError: it cannot have been there.
        """
        if not isinstance(steps, int) or not 0 <= steps <= self._steps * pace + ahead:
            raise ValueError(f"a schedule that has taken {self._steps} steps stood at {steps!r}")
        if pace > 1:
            self.lead_to(steps)
        else:
            self._go_to(steps)

    def after_step(self) -> None:
        """Take note of an optimizer step."""
        if self._scheduler is not None and self._unit == "step":
            self._step()

    def describe(self) -> list[Any] | None:
        """What distinguishes it from another schedule, as JSON; None if there is no schedule."""
        if self._scheduler is None:
            return None
        # Other state may be objects, whose text differs between processes.
        numbers = {
            key: value
            for key, value in self._scheduler.state_dict().items()
            if isinstance(value, (int, float, str))
        }
        return [type(self._scheduler).__name__, self._unit, numbers]

    def _go_to(self, steps: int) -> None:
        if self._build is None:
            return
        if steps < self._steps:
            initial = copy.deepcopy(self._initial)
            for group, before in zip(self._optimizer.param_groups, initial, strict=True):
                put_back(group, before)
            self._scheduler = self._build(self._optimizer)
            self._steps = 0
        with warnings.catch_warnings():
            # A worker without rows, or just started, may not have stepped its optimizer.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while self._steps < steps:
                self._step()

    def _step(self) -> None:
        assert self._scheduler is not None
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(self._losses[self._steps])
        else:
            self._scheduler.step()
        self._steps += 1


def _checked(scheduler: object, unit: Unit) -> LRScheduler:
    if isinstance(scheduler, ReduceLROnPlateau) and unit == "step":
        raise ConfigError(
            "ReduceLROnPlateau follows the loss of whole epochs, so it cannot step after each "
            "optimizer step. Set schedulerEvery='epoch'"
        )
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            "the scheduler must be a function optimizer -> torch.optim.lr_scheduler.LRScheduler, "
            f"but it returned a {type(scheduler).__name__}"
        )
    return scheduler
