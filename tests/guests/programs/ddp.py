"""DistributedDataParallel with a snapshot, as one writes it for torchrun."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from problem import loss_of, network, rows
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT = Path("snapshot.pt")


class Trainer:
    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.model = DistributedDataParallel(network())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.epochs_run = 0
        if SNAPSHOT.exists():
            snapshot = torch.load(SNAPSHOT, map_location="cpu")
            self.model.module.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]
            print(f"Resuming at epoch {self.epochs_run}")

    def train(self, epochs: int) -> None:
        dataset = rows()
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        for epoch in range(self.epochs_run, epochs):
            sampler.set_epoch(epoch)
            for features, targets in loader:
                self.optimizer.zero_grad()
                loss_of(self.model(features), targets).backward()
                self.optimizer.step()
            if self.rank == 0:
                self.save(epoch + 1)

    def save(self, epochs_run: int) -> None:
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": epochs_run,
        }
        torch.save(snapshot, SNAPSHOT)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer()
    trainer.train(options.epochs)
    torch.save(trainer.model.module.state_dict(), f"rank{trainer.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
