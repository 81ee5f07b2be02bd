"""Schedules and optimizers, tried before any worker takes a step."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ConfigError, ModelError, TrainingError
from sparkdl.estimator.fit_settings import FitSettings
from sparkdl.estimator.params.settings import described
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.protocols import OptimizerBuilder, SchedulerBuilder
from sparkdl.replica import Replica
from sparkdl.replica.optimizer_state import build_optimizer
from sparkdl.replica.schedule import Schedule, Unit
from sparkdl.user_code.tracebacks import message_of, text_of

logger = logging.getLogger(__name__)

REHEARSED_STEPS = 20
"""They take some milliseconds; state that grows late does so within a few steps."""


def require_schedule(
    optimizer: torch.optim.Optimizer, scheduler: SchedulerBuilder | None, unit: Unit
) -> Schedule:
    """Build a schedule for an optimizer.

    Raises:
        ModelError: it cannot be built, or is not a schedule.
    """
    try:
        return Schedule(optimizer, scheduler, unit)
    except Exception as error:  # the user's function may raise anything
        own = isinstance(error, ConfigError)
        told = text_of(error) if own else f"the scheduler cannot be built: {message_of(error)}"
        raise ModelError(told) from error


def require_rate_counts(settings: FitSettings, replica: Replica, rate: float) -> None:
    """Check that another ``learningRate`` would be another training.

    Args:
        settings: the estimator's.
        replica: from ``build``.
        rate: theirs.

    Raises:
        ConfigError: the optimizer's parameter groups, or the schedule, set the rates by themselves.
    """
    build: Any = settings.optimizer_builder()

    def rates(rate: float, scheduler: SchedulerBuilder | None) -> list[Any]:
        optimizer = build_optimizer(partial(build, lr=rate), replica.named_trainable())
        Schedule(optimizer, scheduler, settings.getSchedulerEvery())
        # A warm-up from 0 has one rate at first, whatever it is to become.
        return [(group["lr"], group.get("initial_lr")) for group in optimizer.param_groups]

    scheduler, other = settings.getScheduler(), rate / 2
    try:
        with borrowed_random_numbers():
            if rates(rate, scheduler) != rates(other, scheduler):
                return
            fixed = rates(rate, None) == rates(other, None)
    except Exception as error:  # the user's functions may take no other rate
        logger.debug("another learning rate was not tried: %s", error)
        return
    who = described(settings.getOptimizer() if fixed else scheduler)
    how = "in each of its parameter groups" if fixed else "by itself"
    raise ConfigError(
        f"learningRate={rate:g} changes nothing: {who} sets lr {how}. Leave one of the two out"
    )


def require_steps(
    optimizer: torch.optim.Optimizer, scheduler: SchedulerBuilder | None, steps: int
) -> None:
    """Check that a schedule is as long as the training.

    Args:
        optimizer: any that the scheduler takes.
        scheduler: as the user gave it.
        steps: how many the schedule will take.

    Raises:
        ModelError: it ends earlier.
    """
    built = None if scheduler is None else scheduler(optimizer)
    most = getattr(built, "total_steps", None)
    if isinstance(most, int) and steps > most:
        raise ModelError(
            f"{type(built).__name__} ends after total_steps={most}, but this training takes "
            f"{steps} of its steps, those of the worker with the most rows. Set it to {steps}, or "
            "check schedulerEvery"
        )


def require_steady_state(optimizer: OptimizerBuilder, scheduler: SchedulerBuilder | None) -> None:
    """Check on a small stand-in for the model that the optimizer's state does not grow late.

    Replicas exchange the state as it was counted before the first step. What the stand-in does not
    show, the replicas report themselves.

    Raises:
        ModelError: it grows or shrinks in one of the first steps.
    """
    try:
        with borrowed_random_numbers():
            _rehearse(optimizer, scheduler)
    except TrainingError as error:
        raise ModelError(f"tried on a layer of 2 x 2 numbers, {error}") from None
    except Exception as error:  # it may need another model, or its schedule fewer steps
        logger.debug("the optimizer was not rehearsed to the end: %s", error)


def _rehearse(optimizer: OptimizerBuilder, scheduler: SchedulerBuilder | None) -> None:
    stand_in = Replica(
        nn.Linear(2, 2), optimizer, nn.MSELoss(), scheduler=scheduler, scheduler_every="step"
    )
    stand_in.count_optimizer_state()
    for _ in range(REHEARSED_STEPS):
        for parameter in stand_in.trainable():
            parameter.grad = torch.ones_like(parameter)
        stand_in.update()
        stand_in.layout(with_optimizer=True)
