"""Gradients that are not finite, reported with the worker that made them, not all they reach.

DistributedDataParallel passes on each bucket of gradients as soon as backward has filled it. A hook
checks it before it leaves (``FiniteGradients``). A hook in Python takes a tenth of a millisecond
per step, 3 % where steps are short: on CPUs, where nothing else needs one, the sum is checked
instead (``FiniteSum``), and only then which worker caused it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sparkdl.averager.values.finite import ADVICE, count_non_finite
from sparkdl.collective.tree_sum import TreeSum
from sparkdl.errors import ConfigError, NonFiniteError
from sparkdl.protocols import Batch
from sparkdl.strategies.all_reduce.split_layers import SplitLayers
from sparkdl.strategies.base import Run
from sparkdl.strategies.compression.base import Compressor

ROUNDED = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype in which gradients travel, by the name of the compression."""
HOOKS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
"""torch's hooks that send them so."""

_OVERFLOW = ". float16 overflows beyond 65504: compression='bf16' has a wider range"


class FiniteGradients:
    """Ensures that no NaN and no infinity leaves this worker.

    On a GPU, which waiting for a number would stall, the answer is read one step later, still
    before anything of that step has left.

    Args:
        run: this worker's.
        rounded_to: the dtype in which gradients travel, if it is not their own.

    Attributes:
        loss: of the current minibatch, for the message.
    """

    def __init__(self, run: Run, rounded_to: torch.dtype | None = None) -> None:
        self.loss: Tensor | None = None
        self._run = run
        self._rounded_to = rounded_to
        self._answers: list[_Answer] = []
        self._step = 0

    def scan(self, values: Tensor) -> None:
        """Check one bucket.

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

    def before_update(self, batches: Sequence[Batch | None], *, finite: bool = True) -> None:
        """Nothing to do: they have been checked."""

    def settle(self) -> None:
        """Read the answers that are still pending.

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
        """Wait for the answer."""
        self._arrived.synchronize()
        return math.isfinite(float(self._largest))


class FiniteSum:
    """Ensures that no worker takes a step on a sum of gradients that is not finite.

    The sum is the same on all workers, so all of them notice; they then compute their own gradients
    again, on parameters that have not changed yet.

    Args:
        run: this worker's.
        own_loss: from one of its minibatches, or none, to the loss whose gradients it sends.
        split: the layers that groups of workers compute together; None for none.

    Attributes:
        loss: of the current minibatch; as in ``FiniteGradients``.
    """

    def __init__(
        self,
        run: Run,
        own_loss: Callable[[Batch | None], Tensor],
        split: SplitLayers | None = None,
    ) -> None:
        self.loss: Tensor | None = None
        self._run = run
        self._own_loss = own_loss
        self._split = split
        self._parameters = run.replica.trainable()
        self._buckets: dict[int, Tensor] = {}

    def before_update(self, batches: Sequence[Batch | None], *, finite: bool = True) -> None:
        """Check the gradients that all workers have now.

        Args:
            batches: the minibatches that this worker's were computed on.
            finite: whether those are that are not summed over all workers.

        Raises:
            NonFiniteError: they are not finite; it names the workers whose own are not.
        """
        if not finite or any(map(count_non_finite, self._sums())):
            self._find(batches)

    def settle(self) -> None:
        """Nothing is pending."""

    def _sums(self) -> Iterable[Tensor]:
        """DDP's buckets, into which the gradients are views, and the values of sparse ones."""
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        dense = [each for each in gradients if not each.is_sparse]
        if dense and dense[0].untyped_storage().data_ptr() not in self._buckets:
            # DDP lays them out anew once, after the first step.
            storages = [(each, each.untyped_storage()) for each in dense]
            self._buckets = {
                storage.data_ptr(): each.new_empty(0).set_(storage)  # type: ignore[call-overload]
                for each, storage in storages
            }
        return *self._buckets.values(), *(each._values() for each in gradients if each.is_sparse)

    def _find(self, batches: Sequence[Batch | None]) -> None:
        bad, losses = 0, []
        if self._split is not None:
            self._split.gather()  # each computes all of the layers on its own rows
        for batch in batches:
            loss = self._own_loss(batch)
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            bad += sum(count_non_finite(each.to_dense()) for each in gradients if each is not None)
            losses.append(float(loss.detach()))
        mine = {"bad": bad, "loss": repr(sum(losses) / len(losses))}
        told = self._run.averager.gather(mine)
        epoch, step = self._run.epoch, self._run.step
        culprits = [rank for rank, one in enumerate(told) if one["bad"]]
        peeks = (
            ""
            if self._split is None
            else (
                ", with whole layers: the model may read the weight of a layer that hybrid splits "
                "without calling the layer, and the rows of other workers are NaN there"
            )
        )
        found = "; ".join(
            f"rank {rank} has {told[rank]['bad']} NaN or infinite values among its gradients in "
            f"epoch {epoch}, step {step} (loss of its minibatch: {float(told[rank]['loss']):.6g})"
            for rank in culprits
        ) or (
            f"the workers' gradients are not finite once combined in epoch {epoch}, step "
            f"{step}, though each worker's own are when computed again" + peeks
        )
        raise NonFiniteError(
            f"{found}. {ADVICE}", rank=culprits[0] if culprits else 0, epoch=epoch, step=step
        )


def _add_up_in_trees(
    bucket: GradBucket, add_up: TreeSum, workers: int, dtype: torch.dtype | None
) -> Future[Tensor]:
    """Begin with a bucket, which is overwritten by the mean of all workers'.

    Raises:
        ConfigError: the gradients are sparse.
    """
    values = bucket.buffer()
    if values.is_sparse:
        raise ConfigError(
            "reduction=ColorTrees(...) takes dense gradients, but a layer of this model has "
            "sparse ones (nn.Embedding(sparse=True)): build it with sparse=False, or drop "
            "reduction"
        )
    sent = values if dtype is None else values.to(dtype)
    # Divided first, as in DDP: half precision would overflow the other way around.
    total = add_up.begin(sent.div_(workers))
    return total.then(lambda each: values.copy_(each.value()))


def reduce_by(
    rounding: str | None,
    compressor: Compressor | None,
    model: DistributedDataParallel,
    run: Run,
    split: SplitLayers | None = None,
    trees: TreeSum | None = None,
) -> FiniteGradients | FiniteSum:
    """Have a model's gradients reduced and checked.

    Args:
        rounding: one of ``ROUNDED``; None for none.
        compressor: this worker's, which takes them from its ``start_after`` on; None for none.
        model: before its first backward pass.
        run: of the worker whose model it is.
        split: its layers that groups of workers compute together, whose gradients are of others'
            rows too, so that only sums can be checked; None for none.
        trees: what adds them up, in a thread while the backward pass goes on; None for gloo's ring,
            or NCCL.

    Returns:
        What checks them.
    """
    plain = rounding is None and compressor is None and trees is None
    if split is not None or (plain and run.replica.device.type == "cpu"):
        return FiniteSum(run, model.module, split)
    dtype = None if rounding is None else ROUNDED[rounding]
    finite = FiniteGradients(run, dtype)
    reduce = default_hooks.allreduce_hook if rounding is None else HOOKS[rounding]
    places: dict[Tensor, int] = {p: place for place, p in enumerate(run.replica.trainable())}

    def look_and_reduce(state, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations
        finite.scan(bucket.buffer())
        if compressor is not None and run.step > compressor.start_after:
            return compressor.take_bucket(bucket, places)
        if trees is not None:
            return _add_up_in_trees(bucket, trees, run.world_size, dtype)
        return reduce(state, bucket)

    # DDP refuses torch's bfloat16 hook by name on gloo, which has long supported it.
    model.register_comm_hook(None, look_and_reduce)
    return finite
