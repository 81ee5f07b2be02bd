"""How gradients travel, and that a sum which is not finite reaches no parameter.

The sum is the same on all workers, so all of them notice, and only then look for the worker that
caused it: each computes its own gradients again, on parameters that have not changed yet. To look
at them before they leave would take a hook in Python, a tenth of a millisecond per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sparkdl.averager.values.replica_codec import ADVICE, count_non_finite
from sparkdl.collective.tree_sum import TreeSum
from sparkdl.errors import ConfigError, NonFiniteError
from sparkdl.strategies.all_reduce.chain import Step, Transform
from sparkdl.strategies.all_reduce.compression import Compressor
from sparkdl.strategies.all_reduce.sharded import ShardedModel
from sparkdl.strategies.all_reduce.split_layers import SplitLayers
from sparkdl.strategies.base import Run

ROUNDED = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype in which gradients travel, by the name of the compression."""
HOOKS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
"""torch's hooks that send them so."""
OVERFLOW = ". float16 overflows beyond 65504: compression='bf16' has a wider range"


@dataclass(eq=False)
class FiniteGradients(Transform):
    """Ensures that no worker takes a step on a sum of gradients that is not finite.

    Attributes:
        run: this worker's.
        model: its model, wrapped.
        rounded_to: the dtype in which gradients travel, if it is not their own.
        split: the layers that groups of workers compute together; None for none.
    """

    run: Run
    model: DistributedDataParallel | ShardedModel
    rounded_to: torch.dtype | None
    split: SplitLayers | None

    def __post_init__(self) -> None:
        # Those who together have the whole sum.
        self._among = None if self.split is None else self.split.row
        if isinstance(self.model, ShardedModel):
            self._among = self.run.collective

    def after_reduction(self, step: Step) -> None:
        """Check the gradients that all workers have now.

        Raises:
            NonFiniteError: they are not finite; it names the workers whose own are not.
        """
        finite = self._is_finite()
        if self._among is not None:
            bad = torch.as_tensor(finite, device=self._among.device).logical_not().int()
            finite = not self._among.all_reduce(bad)
        if not finite:
            self._find(step)

    def _is_finite(self) -> bool | Tensor:
        """Whether all is finite that this worker has of the sum; on a GPU, it is not yet read."""
        gradients = [each.grad for each in self.run.replica.stepped() if each.grad is not None]
        # Most are views into a few buckets, which are faster to look at than their parts.
        dense = {
            each.untyped_storage().data_ptr(): each for each in gradients if not each.is_sparse
        }
        values = [
            *(each.new_empty(0).set_(each.untyped_storage()) for each in dense.values()),  # type: ignore[call-overload]
            *(each._values() for each in gradients if each.is_sparse),
        ]
        if self.run.replica.device.type == "cpu":
            return not any(map(count_non_finite, values))
        largest = [torch.linalg.vector_norm(each, math.inf) for each in values if each.numel()]
        return not largest or torch.stack([each.double() for each in largest]).isfinite().all()

    def _count(self, loss: Tensor) -> int:
        """How many of this worker's own gradients are not finite."""
        if isinstance(self.model, ShardedModel):
            return self.model.count_non_finite(loss)
        parameters = self.run.replica.trainable()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return sum(
            count_non_finite(each.to_dense().to(self.rounded_to or each.dtype))
            for each in gradients
            if each is not None
        )

    def _find(self, step: Step) -> None:
        bad, losses = 0, []
        if self.split is not None:
            self.split.gather()  # each computes all of the layers on its own rows
        for batch, weight in step.passes:
            loss = self.model.module(batch)
            bad += self._count(loss * weight)
            losses.append(float(loss.detach()))
        mine = {"bad": bad, "loss": repr(sum(losses) / len(losses))}
        told = self.run.averager.gather(mine)
        epoch, number = self.run.epoch, self.run.step
        culprits = [rank for rank, one in enumerate(told) if one["bad"]]
        peeks = (
            ""
            if self.split is None
            else (
                ", with whole layers: the model may read the weight of a layer that hybrid splits "
                "without calling the layer, and the rows of other workers are NaN there"
            )
        )
        rounded = "" if self.rounded_to is None else f", rounded to {self.rounded_to},"
        found = "; ".join(
            f"rank {rank} has {told[rank]['bad']} NaN or infinite values among its gradients"
            f"{rounded} in epoch {epoch}, step {number} (loss of its minibatch: "
            f"{float(told[rank]['loss']):.6g})"
            for rank in culprits
        ) or (
            f"the workers' gradients are not finite once combined{rounded} in epoch {epoch}, step "
            f"{number}, though each worker's own are when computed again" + peeks
        )
        overflow = OVERFLOW if self.rounded_to is torch.float16 else ""
        first = culprits[0] if culprits else 0
        raise NonFiniteError(f"{found}. {ADVICE}{overflow}", rank=first, epoch=epoch, step=number)


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
    model: DistributedDataParallel,
    run: Run,
    rounding: str | None,
    compressor: Compressor | None,
    trees: TreeSum | None,
) -> None:
    """Have a model's gradients reduced in another way than DDP's own, if any is given.

    Args:
        model: before its first backward pass.
        run: of the worker whose model it is.
        rounding: one of ``ROUNDED``; None for none.
        compressor: this worker's, which takes them from its ``start_after`` on; None for none.
        trees: what adds them up, in a thread while the backward pass goes on; None for gloo's ring,
            or NCCL.
    """
    places: dict[Tensor, int] = {p: place for place, p in enumerate(run.replica.trainable())}

    def reduce(state, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations
        if compressor is not None and run.step > compressor.start_after:
            return compressor.take_bucket(bucket, places)
        if trees is not None:
            dtype = None if rounding is None else ROUNDED[rounding]
            return _add_up_in_trees(bucket, trees, run.world_size, dtype)
        hook = default_hooks.allreduce_hook if rounding is None else HOOKS[rounding]
        return hook(state, bucket)

    if (rounding, compressor, trees) != (None, None, None):
        # DDP refuses torch's bfloat16 hook by name on gloo, which has long supported it.
        model.register_comm_hook(None, reduce)
