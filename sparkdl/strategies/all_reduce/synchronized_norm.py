"""BatchNorm over the minibatches of all workers together, on CPUs as well as GPUs.

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
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.errors import ConfigError


@dataclass
class ForwardPass:
    """What the layers know about the current forward pass: whether its rows count."""

    counts: bool = True


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
        ConfigError: there are none.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    if not layers:
        raise ConfigError(
            f"sync_batch_norm is set, but {type(module).__name__} has no BatchNorm layer. Drop it"
        )
    return layers


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
