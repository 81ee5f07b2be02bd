"""FSDP2 with a sharded checkpoint, as one writes it for torchrun."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from problem import loss_of, network, rows
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

CHECKPOINT = Path("checkpoint")


class Training(Stateful):
    """What a checkpoint holds."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.epochs_run = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "epochs_run": self.epochs_run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.epochs_run = state["epochs_run"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = Training(model, optimizer)
    if CHECKPOINT.exists():
        dcp.load({"training": training}, checkpoint_id=CHECKPOINT)
        print(f"Resuming at epoch {training.epochs_run}")

    dataset = rows()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    while training.epochs_run < options.epochs:
        sampler.set_epoch(training.epochs_run)
        for features, targets in loader:
            optimizer.zero_grad()
            loss_of(model(features), targets).backward()
            optimizer.step()
        training.epochs_run += 1
    dcp.save({"training": training}, checkpoint_id=CHECKPOINT)

    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    torch.save(whole, f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
