"""A model with its loss, as DistributedDataParallel runs it, with or without a minibatch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.errors import ConfigError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies.all_reduce.synchronized_norm import ForwardPass


class _Told(torch.autograd.Function):
    """Zero, whose backward pass gives a parameter a number as its gradient."""

    @staticmethod
    def forward(ctx: Any, seat: Tensor, number: Callable[[], float]) -> Tensor:
        """The zero."""
        ctx.seat, ctx.number = seat, number
        return seat.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The number, as it is at that time."""
        return torch.full_like(ctx.seat, ctx.number()), None


class Passenger(nn.Module):
    """A number that travels with the gradients, as that of a parameter no layer has.

    Args:
        number: called in the backward pass.
        dtype: of the gradients.
    """

    def __init__(self, number: Callable[[], float], dtype: torch.dtype) -> None:
        super().__init__()
        self.seat = nn.Parameter(torch.zeros(1, dtype=dtype))
        self._number = number
        self._most = torch.finfo(dtype).max / 2  # the sum is checked, and has to be finite

    def forward(self) -> Tensor:
        """A zero for the loss."""
        zero: Tensor = _Told.apply(self.seat, self._bounded)  # type: ignore[no-untyped-call]
        return zero

    def _bounded(self) -> float:
        return min(self._number(), self._most)

    def take_sum(self, workers: int) -> float:
        """The sum of all workers' numbers since the last call; infinity if it was too large."""
        assert self.seat.grad is not None
        total = float(self.seat.grad) * workers  # DistributedDataParallel makes it a mean
        self.seat.grad = None
        return total if total < self._most * 0.99 else math.inf


class ModelAndLoss(nn.Module):
    """From a minibatch to its loss: DDP has the whole graph, even without a minibatch.

    Args:
        replica: the worker's.
        forward_pass: that of its synchronized BatchNorm layers, if it has any.
        passenger: what travels with the gradients; None for nothing.
        all_used: whether every parameter takes part in every loss.
    """

    def __init__(
        self,
        replica: Replica,
        forward_pass: ForwardPass | None,
        passenger: Passenger | None,
        *,
        all_used: bool,
    ) -> None:
        super().__init__()
        self._passenger = passenger
        self.module = replica.module
        self._forward = replica.forward
        self._trainable = replica.trainable()
        self._touched = self._trainable if all_used else self._trainable[:1]
        self._all_used = all_used
        self._forward_pass = forward_pass
        self._earlier: Batch | None = None

    def forward(self, batch: Batch | None) -> Tensor:
        """The mean loss; without a batch, a zero whose gradients are zero."""
        if self._passenger is None:
            return self._loss(batch)
        zero: Tensor = self._passenger()  # first, so that backward has it last
        loss = self._loss(batch)
        return loss + zero.to(loss.dtype)

    def _loss(self, batch: Batch | None) -> Tensor:
        if self._forward_pass is not None:
            return self._synchronized(batch, self._forward_pass)
        if batch is None:
            loss: Tensor = _NoRows.apply(*self._touched)  # type: ignore[no-untyped-call]
            return loss
        return self._forward(batch)

    def remember_used(self) -> None:
        """Choose what a loss without rows depends on; called while the last gradients exist.

        All workers' optimizers step on whatever one worker's loss depends on. One parameter is
        enough for DDP, and one that the workers with rows use anyway does no harm.
        """
        if not self._all_used:
            used = next((p for p in self._trainable if p.grad is not None), None)
            self._touched = self._touched if used is None else [used]

    def _synchronized(self, batch: Batch | None, forward_pass: ForwardPass) -> Tensor:
        """Run the model in any case: others wait for its layers' sums."""
        forward_pass.counts = batch is not None
        self._earlier = self._earlier if batch is None else batch
        if self._earlier is None:
            raise ConfigError(
                "this worker has no rows left before its first step, and sync_batch_norm needs "
                "a minibatch from every worker. Use fewer workers, or more rows"
            )
        loss = self._forward(self._earlier)
        return loss if forward_pass.counts else loss * 0.0


class _NoRows(torch.autograd.Function):
    """A loss of zero that gives the parameters gradients of zero."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        """The zero."""
        ctx.save_for_backward(*parameters)
        return parameters[0].real.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """The zeros."""
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def distribute(
    replica: Replica,
    forward_pass: ForwardPass | None,
    passenger: Passenger | None = None,
    *,
    bucket_mb: float,
    find_unused_parameters: bool,
) -> DistributedDataParallel:
    """Have the gradients of a replica reduced among the workers.

    Args:
        replica: the worker's.
        forward_pass: of its synchronized BatchNorm layers, if it has any.
        passenger: as in ``ModelAndLoss``.
        bucket_mb: MB of gradients that are sent together.
        find_unused_parameters: whether a parameter may take no part in the loss.

    Returns:
        The module from a minibatch, or None, to its loss.
    """
    with warnings.catch_warnings():
        # torch is renaming the argument; older versions do not know the new name.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return DistributedDataParallel(
            ModelAndLoss(replica, forward_pass, passenger, all_used=not find_unused_parameters),
            bucket_cap_mb=bucket_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=True,
            # All hold the initial center already, and buffers are averaged once per epoch.
            init_sync=False,
            broadcast_buffers=False,
        )
