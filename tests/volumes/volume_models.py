"""Models of patches, which executors import."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Edges(nn.Module):
    """Three channels, which depend on the neighbours of a voxel."""

    def __init__(self, channels: int = 1, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(
            nn.Conv3d(channels, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, outputs, 3, padding=1)
        )

    def forward(self, patch: Tensor) -> Tensor:
        outputs: Tensor = self.net(patch)
        return outputs


class Named(nn.Module):
    """Takes a dict, and returns several outputs; one of them is smaller than its input."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        values = features["raw"]
        return {"same": values, "inner": values[:, :, 2:-2, 3:-3] * 2}


class Fails(nn.Module):
    """Fails on a patch with a certain voxel."""

    def forward(self, patch: Tensor) -> Tensor:
        if (patch == 255).any():
            raise ZeroDivisionError("the user's own mistake")
        return patch


class Shape(nn.Module):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, patch: Tensor) -> Any:
        return self.change(patch)


class Dies(Edges):
    """Kills its process in some of all forward passes, once each.

    Args:
        folder: an empty one, in which passes are counted.
        passes: the numbers of those passes.
    """

    def __init__(self, folder: Path, passes: Collection[int]) -> None:
        super().__init__()
        self.folder, self.passes = str(folder), sorted(passes)

    def forward(self, patch: Tensor) -> Tensor:
        for number in range(len(os.listdir(self.folder)), 100_000):
            try:
                os.close(os.open(f"{self.folder}/{number:06d}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue  # another process has just begun this one
            break
        if number in self.passes:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(patch)
