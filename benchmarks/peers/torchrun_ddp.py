"""Steady-state samples/s of DistributedDataParallel over gloo, on tensors already in memory.

Run by torchrun; rank 0 prints the samples/s of all ranks together:
``torchrun --nproc_per_node=2 torchrun_ddp.py FOLDER {mlp,cnn} EPOCHS``.
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
    folder, name, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    features, labels = digits.read_rows(digits.shard_path(folder, dist.get_rank()))
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(networks.BUILDERS[name]())
    optimizer = digits.make_optimizer(model.parameters())
    for epoch in range(epochs + 1):
        if epoch == 1:  # what comes before is warming up
            dist.barrier()
            start = time.perf_counter()
        for batch in torch.split(torch.randperm(len(features)), digits.BATCH_SIZE):
            digits.train_step(model, optimizer, features[batch], labels[batch])
    rate = torch.tensor(epochs * len(features) / (time.perf_counter() - start))
    dist.all_reduce(rate)
    if dist.get_rank() == 0:
        print(json.dumps({"samples_per_second": float(rate)}), flush=True)
    dist.barrier()
    # torch 2.13 now and then aborts here, on leaving, with "terminate called without an active
    # exception"; everything is measured by then.
    os._exit(0)


if __name__ == "__main__":
    main()
