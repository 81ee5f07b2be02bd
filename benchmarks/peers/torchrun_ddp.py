"""Steady-state samples/s of DistributedDataParallel, on tensors already in the device's memory.

Run by torchrun; rank 0 prints the samples/s of all ranks together:
``torchrun --nproc_per_node=2 torchrun_ddp.py FOLDER {mlp,cnn} EPOCHS {cpu,cuda}``.
"""

import json
import os
import sys
import time
from pathlib import Path

import digits
import networks
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Trains and prints."""
    folder, name, epochs, kind = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rows = digits.read_rows(digits.shard_path(folder, dist.get_rank()))
    features, labels = (tensor.to(device) for tensor in rows)
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(networks.BUILDERS[name]().to(device))
    optimizer = digits.make_optimizer(model.parameters())
    for epoch in range(epochs + 1):
        if epoch == 1:  # what comes before is warming up
            dist.barrier()
            start = time.perf_counter()
        for batch in torch.split(torch.randperm(len(features), device=device), digits.BATCH_SIZE):
            digits.train_step(model, optimizer, features[batch], labels[batch])
    if kind == "cuda":
        torch.cuda.synchronize(device)
    rate = torch.tensor(epochs * len(features) / (time.perf_counter() - start), device=device)
    dist.all_reduce(rate)
    if dist.get_rank() == 0:
        print(json.dumps({"samples_per_second": float(rate)}), flush=True)
    dist.barrier()
    # torch 2.13 now and then aborts here, on leaving, with "terminate called without an active
    # exception"; everything is measured by then.
    os._exit(0)


if __name__ == "__main__":
    main()
