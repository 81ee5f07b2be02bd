"""DistributedDataParallel over gloo with TorchDistributor."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import torch
import torch.distributed as dist
from torch import nn


def train(
    folder: Path,
    epochs: int,
    *,
    learning_rate: float = digits.LEARNING_RATE,
    seed: int = 7,
    on_epoch: Callable[[nn.Module], None] | None = None,
) -> dict[str, Any]:
    """Body of one rank under TorchDistributor: read its shard, train, answer.

    Args:
        folder: data set written by ``digits.write``.
        epochs: passes over the data.
        learning_rate: the learning rate of SGD.
        seed: determines the initial parameters and the order of the rows.
        on_epoch: called on rank 0 with the model after each epoch.

    Returns:
        ``first_step``, the ``time.time()`` right after the first optimizer step, and ``state``, the
        trained model's state dict as numpy arrays.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    features, labels = digits.read_rows(digits.shard_path(folder, dist.get_rank()))
    torch.manual_seed(seed)
    model = nn.parallel.DistributedDataParallel(digits.build_mlp(), gradient_as_bucket_view=True)
    optimizer = digits.make_optimizer(model.parameters(), lr=learning_rate)
    first_step = None
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(features)), digits.BATCH_SIZE):
            digits.train_step(model, optimizer, features[batch], labels[batch])
            first_step = first_step or time.time()
        if on_epoch is not None and dist.get_rank() == 0:
            on_epoch(model)
    state = {name: value.numpy() for name, value in model.module.state_dict().items()}
    dist.destroy_process_group()
    return {"first_step": first_step, "state": state}
