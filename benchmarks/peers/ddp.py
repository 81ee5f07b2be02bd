"""DistributedDataParallel with TorchDistributor, and under torchrun an epoch at a time.

``torchrun ddp.py SIDE THREADS {ddp,none} FOLDER {mlp,cnn} EPOCHS {cpu,cuda} SOCKET`` trains on
tensors already in the device's memory; each epoch waits for its turn (see ``throughput.py``). Ranks
reduce gradients with DistributedDataParallel, or never exchange; one rank alone has all rows.
"""

import functools
import os
import socket
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


GO, DONE = b"g", b"d"
"""What a rank is told before an epoch, and says after it."""


class Turn:
    """A rank's end.

    Args:
        address: path of the socket of ``throughput.in_turns``.
        side: the side that the rank belongs to.
    """

    def __init__(self, address: str, side: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._socket.sendall(side.encode())

    def wait(self) -> None:
        """Wait until this side may train an epoch."""
        if self._socket.recv(1) != GO:
            raise EOFError("the benchmark has ended")

    def done(self) -> None:
        """Say that the epoch has ended."""
        self._socket.sendall(DONE)


turn_of = functools.cache(Turn)
"""The ``Turn`` of this process, made once."""


def main() -> None:
    """Trains."""
    side, threads, exchange, folder, name, epochs, kind, address = sys.argv[1:]
    torch.set_num_threads(int(threads))
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    shards = range(dist.get_rank(), digits.WORKERS, dist.get_world_size())
    rows = [digits.read_rows(digits.shard_path(Path(folder), shard)) for shard in shards]
    features, labels = (torch.cat(parts).to(device) for parts in zip(*rows, strict=True))
    torch.manual_seed(7)
    model: nn.Module = digits.BUILDERS[name]().to(device)
    if exchange == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = digits.make_optimizer(model.parameters())
    turn = Turn(address, side)
    for _ in range(int(epochs)):
        turn.wait()
        for batch in torch.split(torch.randperm(len(features), device=device), digits.BATCH_SIZE):
            digits.train_step(model, optimizer, features[batch], labels[batch])
        if kind == "cuda":
            torch.cuda.synchronize(device)
        turn.done()
    dist.barrier()
    # torch 2.13 now and then aborts on exit with "terminate called without an active exception";
    # everything is measured by then.
    os._exit(0)


if __name__ == "__main__":
    main()
