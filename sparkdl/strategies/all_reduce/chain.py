"""One worker's steps of an all-reduce of gradients, and the chain of what is done to gradients.

A step is this: every worker runs its minibatches forward and backward, the gradients are reduced on
their way, and all take the same optimizer step. Each thing more that is done to gradients, such as
checking, measuring, dividing and preconditioning them, is a ``Transform``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparkdl.collective import Collective
from sparkdl.errors import ModelError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies.base import Run
from sparkdl.strategies.worker_group import WorkerGroup

if TYPE_CHECKING:
    from sparkdl.strategies.all_reduce.sharded import ShardedModel


@dataclass(eq=False)
class Step:
    """One optimizer step, as one worker takes it.

    Attributes:
        rows: of each worker in it.
        batch: the present minibatch; None if the worker has none left, and runs for others only.
        counts: how much that minibatch counts, by default its rows.
        last: whether no other minibatch follows.
        passes: the minibatches until now, each with the factor on its mean loss.
        gain: the factor for the learning rates.
        factor: what makes the gradients that have travelled those of a mean, where the loss divides
            by something else than rows, or by nothing.
    """

    rows: Sequence[int]
    batch: Batch | None = None
    counts: float = 0.0
    last: bool = False
    passes: list[tuple[Batch | None, float]] = field(default_factory=list)
    gain: float = 1.0
    factor: float = 1.0

    @property
    def total(self) -> int:
        """The rows of all workers."""
        return sum(self.rows)


class Transform:
    """What one worker does to its gradients around their reduction; by default nothing."""

    def before_forward(self, step: Step) -> None:
        """Called before the forward pass of each minibatch, or of none."""

    def before_backward(self, step: Step) -> None:
        """Called before its backward pass; may change how much it counts."""

    def after_reduction(self, step: Step) -> None:
        """Called when the parameters have the gradients of all workers; may change them."""

    def after_update(self, step: Step) -> None:
        """Called after the optimizer's step."""

    def gather(self) -> None:
        """Called on all workers before the replica's state is read."""

    def saved(self) -> Mapping[str, Any]:
        """What a worker needs to resume: a part of the strategy's saved state."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume from what all transforms together have ``saved``."""

    def measured(self) -> Mapping[str, float]:
        """What was measured until the end of an epoch, where all workers ask for it together."""
        return {}


class Divided(Transform):
    """Divides gradients by what counts in all workers' minibatches, in place of their rows.

    Args:
        replica: this worker's, whose loss divides by something else.
        collective: all workers of the run.
    """

    def __init__(self, replica: Replica, collective: Collective) -> None:
        self._replica = replica
        self._collective = collective
        self._counted = 0.0

    def before_backward(self, step: Step) -> None:
        """Count what the loss has just been divided by."""
        divisor = self._replica.divisor
        if divisor is not None and step.batch is not None:
            step.counts = divisor.item()
        self._counted += step.counts

    def after_reduction(self, step: Step) -> None:
        """Divide by the sum of it."""
        device = self._replica.device
        total = torch.tensor(self._counted, dtype=torch.float64, device=device)
        self._counted = 0.0
        with self._collective.guarded("the sum of what the loss is divided by"):
            self._collective.all_reduce(total)
        step.factor = step.total / total.item() if total else 0.0
        if step.factor != 1.0:
            for parameter in self._replica.stepped():
                if parameter.grad is not None:
                    parameter.grad.mul_(step.factor)


@dataclass(eq=False)
class Reducer:
    """What one worker needs to take part in every step.

    Attributes:
        run: this worker's.
        group: this worker among the others.
        model: its model, wrapped.
        chain: what is done to its gradients, in this order.
        runs_as_one: whether it runs the model as often as the worker with the most minibatches.
    """

    run: Run
    group: WorkerGroup
    model: DistributedDataParallel | ShardedModel
    chain: Sequence[Transform]
    runs_as_one: bool

    def step(self, batches: Iterator[Batch]) -> None:
        """Take one optimizer step with the other workers.

        Args:
            batches: this worker's minibatches of the step; none if its rows are used up.
        """
        run, replica, collective = self.run, self.run.replica, self.group.collective
        step = Step(self.group.examples_of(range(self.group.steps, self.group.steps + 1)))
        rows = max(step.rows) if self.runs_as_one else step.rows[collective.rank]
        passes = max(1, math.ceil(rows / run.batch_size))
        self.model.module.remember_used()
        replica.optimizer.zero_grad()
        for number in range(passes):
            step.batch, step.last = next(batches, None), number == passes - 1
            for each in self.chain:
                each.before_forward(step)
            with (
                collective.guarded("the reduction of gradients"),
                nullcontext() if step.last else self.model.no_sync(),
            ):
                loss: Tensor = self.model(step.batch)
                step.counts = 0 if step.batch is None else step.batch.examples
                for each in self.chain:
                    each.before_backward(step)
                # DDP divides by the number of workers, however much each has contributed.
                weight = step.counts * collective.world_size / step.total
                if replica.adds_losses:
                    weight = 0.0 if step.batch is None else float(collective.world_size)
                    step.factor = 1 / step.total
                step.passes.append((step.batch, weight))
                (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
            if step.batch is not None:
                run.count(step.batch, loss.detach())
        if self.group.has_committed:  # not only at the next commit, perhaps hours later
            self.group.require_announced(run, step.rows)
        if isinstance(self.model, DistributedDataParallel):
            _require_reduced(self.model, replica)
        for each in self.chain:
            each.after_reduction(step)
        with collective.guarded("the exchange of parameter shards"):
            replica.update(step.gain)
        for each in self.chain:
            each.after_update(step)

    def saved(self) -> dict[str, Any]:
        """What is left of the gradients of earlier steps."""
        return {key: value for each in self.chain for key, value in each.saved().items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume from there."""
        for each in self.chain:
            each.restore(saved)


def _require_reduced(model: DistributedDataParallel, replica: Replica) -> None:
    """Check that the backward pass has reduced the gradients of all parameters.

    DDP itself notices in its next forward pass, if there is one: until then this worker would have
    stepped on gradients of its own, and others would wait for those that it does not send.

    Raises:
        ModelError: it has not, as some parameters took no part in the loss.
    """
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError:
        unused = [f"'{name}'" for name, each in replica.named_trainable() if each.grad is None]
        which = f" ({', '.join(unused[:5])}{', ...' if unused[5:] else ''})" if unused else ""
        raise ModelError(
            f"some parameters took no part in the loss of this minibatch{which}, but the other "
            "workers wait for the gradients of all of them. Set find_unused_parameters=True, an "
            "argument of the strategy, or have the model use every parameter in every minibatch"
        ) from None
