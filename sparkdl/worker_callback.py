"""What is called on every worker around each of its optimizer steps, and what all callbacks are."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from sparkdl.errors import CallbackError, TrainingError
from sparkdl.process.interrupts import Interrupted
from sparkdl.replica import Replica
from sparkdl.user_code.tracebacks import message_of


class Hooks:
    """Base of callbacks; each kind says where it is called, and through which methods.

    A method that looks like a hook but would never be called is refused at class definition.

    Attributes:
        kind: what such callbacks are called in messages.
        methods: their names.
    """

    kind: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **options: Any) -> None:
        """Check a class as it is defined.

        Raises:
            TypeError: it has a method that would never be called, or is of two kinds.
        """
        super().__init_subclass__(**options)
        kinds = {vars(base)["kind"] for base in cls.__mro__ if "kind" in vars(base)}
        if len(kinds) > 1:
            raise TypeError(
                f"{cls.__name__} is called in the driver and on workers, which have copies of it: "
                "they would not share attributes. Write one class for each"
            )
        for name, value in vars(cls).items():
            seems_called = name.startswith(("on_", "before_", "after_"))
            if seems_called and inspect.isfunction(value) and name not in cls.methods:
                raise TypeError(
                    f"{cls.__name__}.{name} would never be called: {cls.kind} are called by "
                    f"{', '.join(cls.methods)}"
                )


@dataclass
class WorkerStep:
    """One optimizer step of one worker, as its callbacks see it.

    Attributes:
        rank: the worker's.
        epoch: counted from 1.
        step: optimizer steps since the start of training, this one included.
        step_of_epoch: optimizer steps since the start of the epoch, this one included.
        model: the worker's replica, on its device.
        optimizer: the replica's optimizer.
        examples: rows trained on in the step; 0 before it.
        loss: the mean loss over those rows, a detached scalar on the replica's device; None before
            the step, and if the worker had no rows left for it.
    """

    rank: int
    epoch: int
    step: int
    step_of_epoch: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    examples: int = 0
    loss: Tensor | None = None


class WorkerCallback(Hooks):
    """Called on every worker around each optimizer step; override what is of interest.

    Each worker has its own copy, shipped the way the model is. What it changes in the model or the
    optimizer is part of the training; what it keeps in its own attributes is in no checkpoint, and
    is lost with its worker. An error raised by a method ends the fit, and names the callback, the
    rank and the step.
    """

    kind = "callbacks on workers"
    methods = ("before_step", "after_step")

    def before_step(self, step: WorkerStep) -> None:
        """The worker is about to train on the minibatch or minibatches of a step.

        Args:
            step: what is known about the step so far.
        """

    def after_step(self, step: WorkerStep) -> None:
        """The optimizer has taken a step; the replicas have not been averaged yet.

        Args:
            step: the step with its loss. On a GPU, reading the loss waits for the GPU.
        """


class StepCalls:
    """Calls every callback of one worker around its steps.

    Args:
        callbacks: the callbacks, in the order in which they are called.
        rank: the worker's.
        replica: the worker's replica.
    """

    def __init__(self, callbacks: Sequence[WorkerCallback], rank: int, replica: Replica) -> None:
        self._callbacks = callbacks
        self._rank = rank
        self._replica = replica
        self._step: WorkerStep
        self._under_way = False
        self._divisor = torch.zeros(())

    def restart(self) -> None:
        """Forget a step that was not finished."""
        self._under_way = False

    def before(self, epoch: int, step: int, step_of_epoch: int) -> None:
        """Tell the callbacks that a step begins.

        Raises:
            CallbackError: a callback failed.
            TrainingError: the end of the previous step was never announced.
        """
        if self._under_way:
            raise TrainingError(
                "the strategy begins a step before ending the previous one: callbacks on workers "
                "would miss it. Use run.train(batch), or call run.end_step() after each optimizer "
                "step"
            )
        self._under_way = True
        self._step = WorkerStep(
            rank=self._rank,
            epoch=epoch,
            step=step,
            step_of_epoch=step_of_epoch,
            model=self._replica.module,
            optimizer=self._replica.optimizer,
        )
        self._each("before_step")

    def count(self, examples: int, loss: Tensor, divisor: Tensor | None = None) -> None:
        """Take note of a minibatch that was trained on in this step.

        Args:
            examples: its rows.
            loss: its mean loss.
            divisor: what that was divided by; None for its rows.
        """
        known, before = self._step, self._step.examples
        known.examples += examples
        share: float | Tensor = examples / max(known.examples, 1)
        if divisor is not None:
            self._divisor = divisor if not before else self._divisor + divisor
            share = torch.where(divisor > 0, divisor / self._divisor, 0.0).to(loss.dtype)
        known.loss = loss if known.loss is None or not before else known.loss.lerp(loss, share)

    def after(self) -> None:
        """Tell the callbacks that a step has been taken.

        Raises:
            CallbackError: a callback failed.
        """
        self._under_way = False
        self._each("after_step")

    def _each(self, method: Literal["before_step", "after_step"]) -> None:
        for callback in self._callbacks:
            try:
                getattr(callback, method)(self._step)
            except Interrupted:
                raise
            except BaseException as error:  # the user's code may raise anything
                raise CallbackError(
                    f"callback {type(callback).__name__} failed in {method}: {message_of(error)}"
                ) from error
