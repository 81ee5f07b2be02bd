"""The task that all contenders train on: handwritten digits as 784 numbers, and small networks.

The images are scikit-learn's 1,797 real digits of 8 x 8 pixels, enlarged to 28 x 28, shifted and
blurred by noise until there are 8,000 to train on and 2,000 to test with. No test image shares its
original with a training image. Written once as Parquet, so that all read the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

if TYPE_CHECKING:  # the environments of peers have no sparkdl
    from sparkdl.strategies import Strategy
    from sparkdl.worker import Job

BATCH_SIZE = 64
EPOCHS = 5
WORKERS = 2
PIXELS = 784
TRAIN_ROWS = 8_000
TEST_ROWS = 2_000
STEPS = -(-TRAIN_ROWS // WORKERS // BATCH_SIZE)
"""Minibatches of a worker in an epoch."""

LEARNING_RATE = 0.1
MOMENTUM = 0.9

make_optimizer = partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=MOMENTUM)


def build_mlp() -> nn.Sequential:
    """Returns the MLP 784-256-128-10: 235,146 float32 parameters, 0.94 MB."""
    return nn.Sequential(
        nn.Linear(PIXELS, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def build_cnn() -> nn.Sequential:
    """Returns a LeNet-sized CNN on 28 x 28 images given as 784 numbers: 206,922 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def job(strategy: Strategy[Any], *, width: int = PIXELS, **settings: Any) -> Job:
    """Returns a training without Spark, of the MLP and on rows of the task by default.

    Args:
        strategy: how replicas agree.
        width: of the column ``features``.
        settings: of ``Job``, where they are to differ.
    """
    from sparkdl.feed.schema import FeedSchema
    from sparkdl.protocols import ColumnSpec
    from sparkdl.worker import Job

    features = ColumnSpec("features", torch.float32, (width,))
    usual: dict[str, Any] = {
        "model": build_mlp,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": make_optimizer,
        "schema": FeedSchema((features,), ColumnSpec("label", torch.int64)),
        "batch_size": BATCH_SIZE,
        "seed": 7,
        "deadline_s": 300.0,
    }
    return Job(strategy=strategy, **(usual | settings))


BUILDERS: dict[str, Callable[[], nn.Module]] = {"mlp": build_mlp, "cnn": build_cnn}


def write(folder: Path, *, seed: int = 7, validation: bool = False) -> None:
    """Writes the data set: ``train/part-<rank>.parquet`` for each worker and ``test.parquet``.

    Args:
        folder: an existing folder.
        seed: determines the shifts, the noise and the order.
        validation: whether all rows come from the training images alone, a fifth of which takes the
            place of the test images: to choose settings by.
    """
    from sklearn.datasets import load_digits

    generator = torch.Generator().manual_seed(seed)
    originals = load_digits()
    images = torch.from_numpy(originals.images).float() / 16.0
    labels = torch.from_numpy(originals.target).long()
    held_out = torch.randperm(len(images), generator=generator) < len(images) // 5
    if validation:
        images, labels = images[~held_out], labels[~held_out]
        held_out = torch.randperm(len(images), generator=generator) < len(images) // 5
    train = _augment(images[~held_out], labels[~held_out], TRAIN_ROWS, generator)
    test = _augment(images[held_out], labels[held_out], TEST_ROWS, generator)
    (folder / "train").mkdir()
    for rank in range(WORKERS):
        part = slice(rank * TRAIN_ROWS // WORKERS, (rank + 1) * TRAIN_ROWS // WORKERS)
        _write_rows(shard_path(folder, rank), train[0][part], train[1][part])
    _write_rows(folder / "test.parquet", *test)


def _augment(
    images: torch.Tensor, labels: torch.Tensor, rows: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws ``rows`` shifted and noisy 28 x 28 images from 8 x 8 ones; returns (rows, 784)."""
    chosen = torch.randint(len(images), (rows,), generator=generator)
    large = nn.functional.interpolate(images[chosen][:, None], size=(24, 24), mode="bilinear")
    padded = nn.functional.pad(large[:, 0], (3, 3, 3, 3))
    shifts = torch.randint(3, (rows, 2), generator=generator)
    shifted = torch.stack(
        [
            image[y : y + 28, x : x + 28]
            for image, (y, x) in zip(padded, shifts.tolist(), strict=True)
        ]
    )
    noisy = shifted + 0.2 * torch.randn(shifted.shape, generator=generator)
    return noisy.clamp(0.0, 1.0).reshape(rows, PIXELS), labels[chosen]


def _write_rows(path: Path, features: torch.Tensor, labels: torch.Tensor) -> None:
    offsets = np.arange(0, features.numel() + 1, PIXELS, dtype=np.int32)
    lists = pa.ListArray.from_arrays(offsets, features.reshape(-1).numpy())
    pq.write_table(pa.table({"features": lists, "label": labels.numpy()}), path)


def shard_path(folder: Path, rank: int) -> Path:
    """Returns the file with the rows of one worker."""
    return folder / "train" / f"part-{rank}.parquet"


def read_rows(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads one file: float32 features of shape (rows, 784), int64 labels of shape (rows,)."""
    return tensors(pq.read_table(path))


def tensors(table: pa.Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns features and labels of rows, as ``read_rows`` does."""
    values = table["features"].combine_chunks().flatten().to_numpy()
    features = torch.from_numpy(values.reshape(-1, PIXELS).copy())
    return features, torch.from_numpy(table["label"].to_numpy().copy())


def accuracy(model: nn.Module, folder: Path) -> float:
    """Returns the fraction of the test rows that the model classifies correctly."""
    features, labels = read_rows(folder / "test.parquet")
    model.eval()
    with torch.inference_mode():
        predicted = model(features).argmax(dim=1)
    return float((predicted == labels).float().mean())


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    features: torch.Tensor,
    labels: torch.Tensor,
) -> None:
    """Takes one optimizer step on one batch: features (batch, 784), labels (batch,)."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(features), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
