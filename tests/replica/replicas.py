"""Replicas of small models in float64, and with which optimizers they are tried."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.protocols import Batch
from sparkdl.replica import Replica

SGD = partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS: dict[str, Any] = {
    "sgd": SGD,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    "adadelta": torch.optim.Adadelta,
}


def batch(seed: int = 0, rows: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return Batch((features,), torch.arange(rows) % 3, last=False)


def replica_of(module: nn.Module, optimizer: Any = SGD) -> Replica:
    return Replica(module, optimizer, nn.CrossEntropyLoss())


def batch_norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def views_of(tensors: list[Tensor], flats: list[Tensor]) -> bool:
    """Whether every tensor lives inside one of the flat buffers."""
    homes = {flat.untyped_storage().data_ptr() for flat in flats}
    return all(tensor.untyped_storage().data_ptr() in homes for tensor in tensors)


def train_plainly(
    module: nn.Module, optimizer: torch.optim.Optimizer, features: Any, targets: Any
) -> Tensor:
    """The oracle: one step of plain torch on a minibatch; returns its mean loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(module(torch.as_tensor(features)), torch.as_tensor(targets))
    loss.backward()
    optimizer.step()
    return loss.detach()


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor that it keeps."""
    values = [each for state in optimizer.state.values() for each in state.values()]
    return [each for each in values if isinstance(each, Tensor)]
