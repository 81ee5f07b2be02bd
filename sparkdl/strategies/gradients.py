"""What happens to a worker's gradients before they are added to those of the others.

DistributedDataParallel hands over each bucket of gradients as soon as backward has filled it. It is
looked at, so that NaN is reported by the worker that made it and not by all that it reaches, and
then reduced by one of torch's communication hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from sparkdl.averager.finite import ADVICE, count_non_finite
from sparkdl.errors import NonFiniteError
from sparkdl.strategies.base import Run

ROUNDED = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""In what gradients travel, by the name of the compression."""
START_POWER_SGD = 10
"""Steps of full gradients before PowerSGD's low-rank ones."""

_OVERFLOW = ". float16 ends at 65504: compression='bf16' goes further"


class FiniteGradients:
    """Sees to it that no NaN and no infinity leaves this worker.

    On a GPU, where waiting for a number would stall it, the answer is read one step later, still
    before anything of that step has left.

    Args:
        run: this worker's.
        rounded_to: the dtype in which gradients travel, if it is not their own.

    Attributes:
        loss: of the minibatch under way, for the message.
    """

    def __init__(self, run: Run, rounded_to: torch.dtype | None = None) -> None:
        self.loss: Tensor | None = None
        self._run = run
        self._rounded_to = rounded_to
        self._answers: list[_Answer] = []
        self._step = 0

    def look_at(self, values: Tensor) -> None:
        """Look at one bucket.

        Args:
            values: its gradients, shape (elements,).

        Raises:
            NonFiniteError: there are NaN or infinite values, on a GPU in the step before.
        """
        if self._rounded_to is not None:
            values = values.to(self._rounded_to)
        if values.device.type == "cpu":
            bad = count_non_finite(values)
            if bad:
                raise self._error(f"{bad} NaN or infinite values", self._run.step, self.loss)
            return
        if self._step != self._run.step:
            self.settle()
            self._step = self._run.step
        self._answers.append(_Answer(values))

    def settle(self) -> None:
        """Read the answers that are still to come.

        Raises:
            NonFiniteError: there were NaN or infinite values.
        """
        answers, self._answers = self._answers, []
        if not all(answer.finite() for answer in answers):
            raise self._error("NaN or infinite values", self._step, None)

    def _error(self, found: str, step: int, loss: Tensor | None) -> NonFiniteError:
        rank, epoch = self._run.rank, self._run.epoch
        rounded = "" if self._rounded_to is None else f", rounded to {self._rounded_to},"
        overflow = _OVERFLOW if self._rounded_to is torch.float16 else ""
        of_loss = "" if loss is None else f" (loss of its minibatch: {float(loss):.6g})"
        return NonFiniteError(
            f"rank {rank} has {found} among its gradients{rounded} in epoch {epoch}, step "
            f"{step}{of_loss}. {ADVICE}{overflow}",
            rank=rank,
            epoch=epoch,
            step=step,
        )


class _Answer:
    """Whether values on a GPU are finite, on its way to the CPU."""

    def __init__(self, values: Tensor) -> None:
        self._largest = torch.empty((), dtype=values.dtype, pin_memory=True)
        self._largest.copy_(torch.linalg.vector_norm(values, math.inf), non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def finite(self) -> bool:
        """Wait for it."""
        self._arrived.synchronize()
        return math.isfinite(float(self._largest))


def reduce_by(
    model: DistributedDataParallel, compression: str | None, finite: FiniteGradients
) -> None:
    """Let a model's gradients be looked at and then reduced.

    Args:
        model: before its first backward pass.
        compression: None, or a name that ``GradientAllReduce`` knows.
        finite: looks at them.
    """
    state, reduce = _hook(compression)

    def look_and_reduce(state, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations
        finite.look_at(bucket.buffer())
        return reduce(state, bucket)

    # Under its own name DDP refuses torch's bfloat16 on gloo, which has been able to for long.
    model.register_comm_hook(state, look_and_reduce)


def _hook(compression: str | None) -> tuple[Any, Callable[..., Any]]:
    """One of torch's hooks, with its state."""
    if compression is None:
        return None, default_hooks.allreduce_hook
    if compression == "fp16":
        return None, default_hooks.fp16_compress_hook
    if compression == "bf16":
        return None, default_hooks.bf16_compress_hook
    return PowerSGDState(process_group=None, start_powerSGD_iter=START_POWER_SGD), powerSGD_hook
