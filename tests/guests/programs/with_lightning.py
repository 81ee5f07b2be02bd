"""Lightning's Trainer, as one writes it for torchrun."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from problem import loss_of, network, rows
from torch.utils.data import DataLoader


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        features, targets = batch
        loss = loss_of(self.network(features), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    options = parser.parse_args()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_epochs=options.epochs,
        callbacks=[ModelCheckpoint(dirpath="checkpoints", save_last=True)],
        logger=False,
    )
    module = Regression()
    trainer.fit(module, DataLoader(rows(), batch_size=8), ckpt_path="last")
    torch.save(module.network.state_dict(), f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
