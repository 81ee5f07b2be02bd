"""The networks of ``volumes.py``, in a module that executors import."""

import os
import random
import signal

import torch
from torch import Tensor, nn

MOST_PATCHES = 50
"""A task that is killed is killed before it has computed so many; its chunk has more."""


class UNet(nn.Module):
    """A 3-D U-Net of two levels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = self._convolutions(1, 8)
        self.down = nn.Conv3d(8, 16, 2, stride=2)
        self.inner = self._convolutions(16, 16)
        self.up = nn.ConvTranspose3d(16, 8, 2, stride=2)
        self.last = self._convolutions(16, 8)
        self.head = nn.Conv3d(8, 2, 1)

    @staticmethod
    def _convolutions(given: int, width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(given, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv3d(width, width, 3, padding=1),
            nn.ReLU(),
        )

    def forward(self, patch: Tensor) -> Tensor:
        fine = self.first(patch / 255)
        coarse = self.up(self.inner(self.down(fine)))
        outputs: Tensor = self.head(self.last(torch.cat([fine, coarse], dim=1)))
        return outputs


class Deadly(UNet):
    """Kills its process in some tasks, once each, after a random number of patches.

    Args:
        folder: an empty one, for what all processes know of it.
        share: of tasks.
    """

    def __init__(self, folder: str, share: float) -> None:
        super().__init__()
        self.folder, self.share = folder, share

    def forward(self, patch: Tensor) -> Tensor:
        self._maybe_die()
        return super().forward(patch)

    def _maybe_die(self) -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:  # the trial in the driver
            return
        task = context.partitionId()
        every = round(1 / self.share)
        if task % every != every - 2:
            return
        passes = f"{self.folder}/passes-{task}"
        with open(passes, "a") as file:
            file.write(".")
        if os.path.getsize(passes) == random.Random(task).randrange(2, MOST_PATCHES):
            open(f"{self.folder}/killed-{task}", "x").close()
            os.kill(os.getpid(), signal.SIGKILL)


class Thin(nn.Module):
    """One layer, which costs little."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(1, 2, 1)

    def forward(self, patch: Tensor) -> Tensor:
        outputs: Tensor = self.layer(patch)
        return outputs
