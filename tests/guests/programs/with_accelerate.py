"""A loop that accelerate has prepared, as one writes it for ``accelerate launch``."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from problem import loss_of, network, rows
from torch.utils.data import DataLoader


class Progress:
    """How far the training is; a checkpoint holds it."""

    def __init__(self) -> None:
        self.epochs_run = 0

    def state_dict(self) -> dict[str, int]:
        return {"epochs_run": self.epochs_run}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs_run = state["epochs_run"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()
    accelerator = Accelerator()
    set_seed(3)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(rows(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if Path("state").exists():
        accelerator.load_state("state")
        accelerator.print(f"Resuming at epoch {progress.epochs_run}")

    while progress.epochs_run < options.epochs:
        for features, targets in loader:
            loss = loss_of(model(features), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        progress.epochs_run += 1
    accelerator.save_state("state")

    whole = accelerator.unwrap_model(model).state_dict()
    torch.save(whole, f"rank{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
