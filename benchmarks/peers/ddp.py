"""DistributedDataParallel over gloo, both with TorchDistributor and bare under torchrun.

Run by torchrun, rank 0 prints the steady-state samples/s of all ranks together:
``torchrun --nproc_per_node=2 ddp.py FOLDER EPOCHS {ddp,none}``; ``none`` never exchanges.
"""

import json
import os
import sys
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
    model = nn.parallel.DistributedDataParallel(digits.build_mlp())
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


def measure(folder: Path, epochs: int, exchange: bool) -> dict[str, float] | None:
    """Measures samples/s of all ranks together on in-memory tensors, without the first epoch.

    Args:
        folder: data set written by ``digits.write``.
        epochs: measured passes over the data.
        exchange: whether to reduce gradients with DDP; otherwise the ranks train on their own.

    Returns:
        On rank 0 an object with ``samples_per_second``; None elsewhere.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    features, labels = digits.read_rows(digits.shard_path(folder, dist.get_rank()))
    model: nn.Module = digits.build_mlp()
    if exchange:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = digits.make_optimizer(model.parameters())
    for epoch in range(epochs + 1):
        if epoch == 1:  # everything before is warm-up
            dist.barrier()
            start = time.perf_counter()
        for batch in torch.split(torch.randperm(len(features)), digits.BATCH_SIZE):
            digits.train_step(model, optimizer, features[batch], labels[batch])
    rate = torch.tensor(epochs * len(features) / (time.perf_counter() - start))
    dist.all_reduce(rate)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return {"samples_per_second": float(rate)} if rank == 0 else None


if __name__ == "__main__":
    measured = measure(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "ddp")
    if measured is not None:
        print(json.dumps(measured), flush=True)
    # torch 2.13 now and then aborts on exit with "terminate called without an active exception";
    # everything is measured by then.
    os._exit(0)
