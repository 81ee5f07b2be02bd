"""Plain torch on tensors already in the device's memory, an epoch at a time.

Run by torchrun; each epoch waits for its turn (see ``epoch_turns``). Ranks reduce gradients with
DistributedDataParallel, or never exchange; one rank alone has all rows.
``torchrun torchrun_ddp.py SIDE THREADS {ddp,none} FOLDER {mlp,cnn} EPOCHS {cpu,cuda} SOCKET``.
"""

import json
import os
import sys
from pathlib import Path

import digits
import networks
import torch
import torch.distributed as dist
from epoch_turns import Turn
from torch import nn


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
    model: nn.Module = networks.BUILDERS[name]().to(device)
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
    if dist.get_rank() == 0:
        print(json.dumps({"epochs": int(epochs)}), flush=True)
    dist.barrier()
    # torch 2.13 now and then aborts on exit with "terminate called without an active exception";
    # everything is measured by then.
    os._exit(0)


if __name__ == "__main__":
    main()
