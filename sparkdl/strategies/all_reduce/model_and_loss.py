"""A model with its loss, as DistributedDataParallel runs it, with or without a minibatch.

Its BatchNorm may be over the minibatches of all workers together, on CPUs as well as GPUs.
torch.nn.SyncBatchNorm trains on GPUs only, and needs a minibatch from every worker in every step.
With workers r = 1..R, where worker r has n_r values of a channel, with mean m_r and sum of squared
deviations s_r:

    mean = sum_r n_r m_r / N          N = sum_r n_r
    var  = sum_r (s_r + n_r (m_r - mean)^2) / N

This takes one sum over the workers in forward, of R rows of which each fills its own, and one in
backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.errors import ConfigError
from sparkdl.process.randomness import random_state, set_random_state
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies.all_reduce.split_layers import SplitLayers


@dataclass
class ForwardPass:
    """What the layers know about the current forward pass.

    Attributes:
        counts: whether its rows count.
        undone: whether one that does not count leaves buffers and random numbers as they were;
            synchronized layers have the same statistics on all workers in any case.
    """

    counts: bool = True
    undone: bool = False


def synchronize(module: nn.Module) -> ForwardPass:
    """Make every BatchNorm layer of a module normalize over all workers while it trains.

    Every worker must then run forward and backward as often as every other; one that has no rows
    left does so on rows that do not count.

    Args:
        module: changed in place; its parameters and buffers stay the same.

    Returns:
        What to set before each forward pass.

    Raises:
        ConfigError: there is no such layer.
    """
    forward_pass = ForwardPass()
    for layer in batch_norm_layers(module):
        layer.forward = functools.partial(_forward, layer, forward_pass, type(layer).forward)  # type: ignore[method-assign]
    return forward_pass


def batch_norm_layers(module: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers of a module.

    Raises:
        ConfigError: there are none, or one computes something else than torch's.
    """
    layers = {name: each for name, each in module.named_modules() if isinstance(each, _BatchNorm)}
    if not layers:
        raise ConfigError(
            f"sync_batch_norm is set, but {type(module).__name__} has no BatchNorm layer. Drop it"
        )
    for name, layer in layers.items():
        if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise ConfigError(
                f"sync_batch_norm computes BatchNorm layers as torch does, but '{name}' is a "
                f"{type(layer).__name__}, which has a forward of its own. Drop sync_batch_norm, or "
                "build the model with torch's BatchNorm and what else that does as a layer after it"
            )
    return [*layers.values()]


def _forward(layer: _BatchNorm, forward_pass: ForwardPass, own_forward: Any, x: Tensor) -> Tensor:
    """Normalize x of shape (examples, channels, ...)."""
    if not layer.training:
        normalized: Tensor = own_forward(layer, x)
        return normalized
    wide = x if x.dtype is torch.float64 else x.float()
    count, mean, variance = _over_workers(wide, forward_pass)
    _update_statistics(layer, count, mean.detach(), variance.detach())
    scale = (variance + layer.eps).rsqrt()
    shift = -mean * scale
    if layer.affine:
        scale, shift = scale * layer.weight, shift * layer.weight + layer.bias
    shape = (1, -1, *[1] * (x.dim() - 2))
    return (wide * scale.view(shape) + shift.view(shape)).to(x.dtype)


def _over_workers(x: Tensor, forward_pass: ForwardPass) -> tuple[Tensor, Tensor, Tensor]:
    """Values per channel, their mean and variance, over all workers' rows that count."""
    channels = x.shape[1]
    columns = x.transpose(0, 1).reshape(channels, -1)
    values = columns.shape[1] if forward_pass.counts else 0
    variance, mean = torch.var_mean(columns, dim=1, correction=0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = torch.cat([mean, variance, mean.new_full((1,), values)])
    rows = own.new_zeros(world_size, len(own)).index_copy(
        0, torch.tensor([rank], device=own.device), own.unsqueeze(0)
    )
    rows = _Sum.apply(rows)  # type: ignore[no-untyped-call]
    counts = rows[:, -1:].detach()
    total = counts.sum()
    if total <= 1:
        raise ValueError(
            f"a BatchNorm layer has {int(total)} value per channel across all workers; it needs "
            "more than 1 to train"
        )
    means, variances = rows[:, :channels], rows[:, channels:-1]
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    return total, mean, variance


def _update_statistics(layer: _BatchNorm, count: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics as torch does, in place, since they are views of flat buffers."""
    if layer.running_mean is None or layer.running_var is None:
        return
    momentum = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
    with torch.no_grad():
        unbiased = variance * (count / (count - 1))
        for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
            running.lerp_(new.to(running.dtype), 0.0 if momentum is None else momentum)


class _Sum(torch.autograd.Function):
    """The sum over all workers; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """The sum."""
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The sum of gradients."""
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total


class ModelAndLoss(nn.Module):
    """From a minibatch to its loss: DDP has the whole graph, even without a minibatch.

    Args:
        replica: the worker's.
        forward_pass: that of its synchronized BatchNorm layers, if it has any.
        all_used: whether every parameter takes part in every loss.
        split: the layers that groups of workers compute together; None for none.
    """

    def __init__(
        self,
        replica: Replica,
        forward_pass: ForwardPass | None,
        *,
        all_used: bool,
        split: SplitLayers | None = None,
    ) -> None:
        super().__init__()
        self._split = split
        self.module = replica.module
        self._forward = replica.forward
        apart = set() if split is None else split.parameters
        self._trainable = [each for each in replica.trainable() if each not in apart]
        self.anchor: nn.Parameter | None = None
        if not self._trainable:  # DistributedDataParallel needs one
            self.anchor = nn.Parameter(torch.zeros(1, device=replica.device))
            self._trainable = [self.anchor]
        # DistributedDataParallel looks for it.
        self._ddp_params_and_buffers_to_ignore = [
            name for name, each in self.named_parameters() if each in apart
        ]
        # DistributedDataParallel expects sparse gradients of the same.
        self._sparse = {
            each.weight
            for each in replica.module.modules()
            if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse
        }
        self._touched = self._trainable if all_used else self._trainable[:1]
        self._all_used = all_used
        self._forward_pass = forward_pass
        self._earlier: Batch | None = None
        self._device = replica.device

    def forward(self, batch: Batch | None) -> Tensor:
        """The mean loss; without a batch, a zero whose gradients are zero."""
        if batch is None and self._forward_pass is None:
            sparse = tuple(each in self._sparse for each in self._touched)
            zero: Tensor = _NoRows.apply(sparse, *self._touched)  # type: ignore[no-untyped-call]
            return zero if self._split is None else self._split.serve(zero)
        if self._forward_pass is not None:
            loss = self._synchronized(batch, self._forward_pass)
        else:
            assert batch is not None
            loss = self._forward(batch)
        if self._split is not None:
            self._split.end_forward()
        if self.anchor is not None:
            loss = loss + _NoRows.apply((False,), self.anchor).to(loss.dtype)  # type: ignore[no-untyped-call]
        return loss

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
                "this worker has no rows left before its first step, and sync_batch_norm and "
                "shard_parameters need a minibatch from every worker. Use fewer workers, or more "
                "rows"
            )
        if forward_pass.counts:
            return self._forward(self._earlier)
        with _undone(self.module, self._device) if forward_pass.undone else nullcontext():
            return self._forward(self._earlier) * 0.0


@contextmanager
def _undone(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back what a forward pass does to a module's buffers and to random numbers."""
    held = [
        (owner, dict(owner._buffers), [b if b is None else b.clone() for b in each])
        for owner in module.modules()
        for each in [list(owner._buffers.values())]
        if each
    ]
    drawn = random_state(device)
    try:
        yield
    finally:
        set_random_state(drawn, device)
        for owner, buffers, values in held:
            owner._buffers.update(buffers)
            for buffer, before in zip(buffers.values(), values, strict=True):
                if buffer is not None and before is not None:
                    # By ``data``, as the backward pass may still need the buffer.
                    buffer.data.copy_(before)


class _NoRows(torch.autograd.Function):
    """A loss of zero that gives the parameters gradients of zero."""

    @staticmethod
    def forward(ctx: Any, sparse: tuple[bool, ...], *parameters: Tensor) -> Tensor:
        """The zero; ``sparse`` says of each parameter whether its gradient is."""
        ctx.sparse = sparse
        ctx.save_for_backward(*parameters)
        return parameters[0].real.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The zeros."""
        pairs = zip(ctx.saved_tensors, ctx.sparse, strict=True)
        return (None, *(_no_rows_of(p) if sparse else torch.zeros_like(p) for p, sparse in pairs))


def _no_rows_of(table: Tensor) -> Tensor:
    """A sparse gradient of an embedding, for no row of it."""
    rows = torch.empty(1, 0, dtype=torch.int64, device=table.device)
    return torch.sparse_coo_tensor(rows, table.new_empty(0, *table.shape[1:]), table.shape)
