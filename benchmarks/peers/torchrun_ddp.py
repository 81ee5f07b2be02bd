"""DistributedDataParallel on tensors already in the device's memory, an epoch at a time.

Run by torchrun; each epoch waits for its turn (see ``epoch_turns``):
``torchrun --nproc_per_node=2 torchrun_ddp.py FOLDER {mlp,cnn} EPOCHS {cpu,cuda} SOCKET SIDE``.
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
    folder, name, epochs, kind = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rows = digits.read_rows(digits.shard_path(folder, dist.get_rank()))
    features, labels = (tensor.to(device) for tensor in rows)
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(networks.BUILDERS[name]().to(device))
    optimizer = digits.make_optimizer(model.parameters())
    turn = Turn(*sys.argv[5:])
    for _ in range(epochs):
        turn.wait()
        for batch in torch.split(torch.randperm(len(features), device=device), digits.BATCH_SIZE):
            digits.train_step(model, optimizer, features[batch], labels[batch])
        if kind == "cuda":
            torch.cuda.synchronize(device)
        turn.done()
    if dist.get_rank() == 0:
        print(json.dumps({"epochs": epochs}), flush=True)
    dist.barrier()
    # torch 2.13 now and then aborts on exit with "terminate called without an active exception";
    # everything is measured by then.
    os._exit(0)


if __name__ == "__main__":
    main()
