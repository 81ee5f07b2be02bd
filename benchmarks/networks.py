"""The networks of ``inference.py`` and ``volumes.py``, in a module that executors import."""

import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, SIZE = 5000, 32, 64
KILLED_TASK, KILLED_PASS = 3, 17
"""Which task is killed, and in which pass through the network: it has more of them."""


@dataclass(frozen=True)
class Case:
    """One model and the rows that it predicts for.

    Attributes:
        name: as in ``CASES``.
        rows: the number of rows.
        shape: the shape of one row.
        image: whether a row is an encoded image instead of an array.
        build: makes the model, the same one each time.
    """

    name: str
    rows: int
    shape: tuple[int, ...]
    image: bool
    build: Callable[[], nn.Module]

    def draw(self, draws: np.random.Generator, rows: int) -> np.ndarray:
        """Returns rows of an array column."""
        if self.name == "transformer":
            return draws.integers(0, VOCABULARY, (rows, *self.shape))
        return draws.random((rows, *self.shape), dtype=np.float32)

    def example(self) -> Tensor:
        """Returns one row in the model's input format."""
        kinds = {"mlp": torch.float32, "cnn": torch.uint8, "transformer": torch.int64}
        return torch.zeros((1, *self.shape), dtype=kinds[self.name])

    def tensor(self, rows: np.ndarray) -> Tensor:
        """Converts a column's rows to the model's input format."""
        if not self.image:
            return torch.from_numpy(rows)
        from PIL import Image  # which the networks of volumes do not need

        pixels = [np.asarray(Image.open(io.BytesIO(row))) for row in rows]
        return torch.from_numpy(np.stack(pixels).transpose(0, 3, 1, 2).copy())


def mlp() -> nn.Module:
    """784 floats to ten numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


class Convolutions(nn.Module):
    """Bytes of (3, 32, 32) to ten numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 10),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Outputs for bytes of shape (n, 3, 32, 32)."""
        outputs: Tensor = self.layers(pixels.float() / 255)
        return outputs


class Encoder(nn.Module):
    """Tokens of (32,) to ten numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        layer = nn.TransformerEncoderLayer(SIZE, 4, 2 * SIZE, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(SIZE, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Outputs for tokens of shape (n, 32), int64."""
        outputs: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(dim=1))
        return outputs


def cnn() -> nn.Module:
    """A small CNN."""
    torch.manual_seed(0)
    return Convolutions()


def transformer() -> nn.Module:
    """A small transformer encoder."""
    torch.manual_seed(0)
    return Encoder()


CASES = {
    case.name: case
    for case in (
        Case("mlp", 200_000, (784,), False, mlp),
        Case("cnn", 90_000, (3, 32, 32), True, cnn),
        Case("transformer", 60_000, (LENGTH,), False, transformer),
    )
}


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
    """Kills its process in the first attempt at one task.

    Args:
        folder: where it leaves a file that says so.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.passes = folder, 0

    def forward(self, patch: Tensor) -> Tensor:
        from pyspark import TaskContext

        context = TaskContext.get()  # none in the driver, which tries the network
        if context and context.partitionId() == KILLED_TASK and not context.attemptNumber():
            self.passes += 1
            if self.passes == KILLED_PASS:
                (self.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(patch)
