"""One worker's steps of an all-reduce of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies.all_reduce.gradient_noise import NoiseMeter
from sparkdl.strategies.all_reduce.gradients import FiniteGradients, FiniteSum
from sparkdl.strategies.all_reduce.model_and_loss import ModelAndLoss
from sparkdl.strategies.all_reduce.sharded import ShardedModel
from sparkdl.strategies.all_reduce.split_layers import SplitLayers
from sparkdl.strategies.compression.base import Compressor
from sparkdl.strategies.kfac import Preconditioning
from sparkdl.strategies.worker_group import WorkerGroup


class Paced:
    """Steps at the optimizer's own learning rates."""

    def gain(self, rows: int) -> float:
        """The factor for the learning rates of the next step.

        Args:
            rows: of all workers in it; fewer than usual at the end of an epoch.
        """
        return 1.0

    def taken(self, replica: Replica, worth: float) -> None:
        """Called after each step.

        Args:
            replica: this worker's.
            worth: the step's gain.
        """


@dataclass(eq=False)
class Reducer:
    """What one worker needs to take part in every step.

    Attributes:
        model: its model, wrapped.
        group: this worker among the others.
        finite: checks its gradients.
        compressor: has what was left out of them; None if nothing is.
        batch_size: rows per minibatch.
        meter: measures their noise; None if nobody asks.
        preconditioning: what is applied to them; None for nothing.
        split: the layers that groups of workers compute together; None for none.
        paced: sets the learning rate of the optimizer's steps.
    """

    model: DistributedDataParallel | ShardedModel
    group: WorkerGroup
    finite: FiniteGradients | FiniteSum
    compressor: Compressor | None
    batch_size: int
    meter: NoiseMeter | None
    preconditioning: Preconditioning | None
    split: SplitLayers | None = None
    paced: Paced = field(default_factory=Paced)

    def step(
        self, replica: Replica, batches: Iterator[Batch], *, all_passes: bool
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Take one optimizer step with the other workers.

        Args:
            replica: this worker's.
            batches: its minibatches of this step; none if its rows are used up.
            all_passes: whether it runs the model as often as the worker with the most minibatches.

        Yields:
            Each minibatch with its mean loss.
        """
        collective, step = self.group.collective, self.group.steps
        rows = self.group.examples_of(range(step, step + 1))
        total = sum(rows)
        passes = math.ceil((max(rows) if all_passes else rows[collective.rank]) / self.batch_size)
        wrapped: ModelAndLoss = self.model.module
        wrapped.remember_used()
        replica.optimizer.zero_grad()
        if self.split is not None:
            self.split.begin_step()
        trained: list[Batch | None] = []
        # What compressors leave out, they send later, when others count.
        counting = replica.may_divide and self.compressor is None
        counted = 0.0
        for number in range(max(1, passes)):
            batch = next(batches, None)
            trained.append(batch)
            now = number >= passes - 1
            if self.preconditioning is not None:
                self.preconditioning.counts = batch is not None
            with (
                collective.guarded("the reduction of gradients"),
                self._sync(now=now),
                nullcontext() if self.split is None else self.split.running(last=now),
            ):
                loss: Tensor = self.model(batch)
                self.finite.loss = loss.detach()
                # DDP divides by the number of workers, however much each has contributed.
                examples = 0 if batch is None else batch.examples
                counts = self._counts(replica, examples) if counting else examples
                counted += counts
                weight = counts * collective.world_size / total
                if replica.adds_losses:
                    weight = float(collective.world_size if examples else 0)
                with self._measured(weight, examples):
                    (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
            if batch is not None:
                yield batch, self.finite.loss
        finite = self.split is None or self.split.reduce()
        if self.meter is None or not self.meter.end_step(rows):
            self.finite.before_update(trained, finite=finite)
        if self.compressor is not None:
            self.compressor.before_update()
        if counting:
            self._divide(replica, total, counted)
        gain = self.paced.gain(total)
        if self.preconditioning is not None:
            self.preconditioning.precondition(replica, total, gain)
        with collective.guarded("the exchange of parameter shards"):
            replica.update(gain)
        self.paced.taken(replica, gain)

    @staticmethod
    def _counts(replica: Replica, examples: int) -> float:
        """What counts in the minibatch that the replica has last seen, if that had examples."""
        divisor = replica.divisor
        return examples if divisor is None or not examples else divisor.item()

    def _divide(self, replica: Replica, rows: int, counted: float) -> None:
        """Divide the gradients by what counts in all workers' minibatches, in place of their rows.

        Args:
            replica: this worker's.
            rows: of all workers in this step.
            counted: what counts in this worker's.
        """
        total = torch.tensor(counted, dtype=torch.float64, device=replica.device)
        with self.group.collective.guarded("the sum of what the loss is divided by"):
            self.group.collective.all_reduce(total)
        factor = rows / total.item() if total else 0.0
        if factor != 1.0:
            for parameter in replica.stepped():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _measured(self, weight: float, examples: int) -> AbstractContextManager[None]:
        return nullcontext() if self.meter is None else self.meter.backward(weight, examples)

    def _sync(self, *, now: bool) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = nullcontext() if now else self.model.no_sync()
        return context
