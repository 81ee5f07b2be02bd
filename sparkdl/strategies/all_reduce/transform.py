"""What is done to gradients around their reduction, in one optimizer step of all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkdl.protocols import Batch


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
