"""Images/s of photographs in a folder, in the first epoch and in later ones, against a DataLoader.

4,000 JPEGs of 500 x 375 pixels become float32 tensors of 3 x 224 x 224. Ours: a Spark job of two
tasks lists the folder (binaryFile), opens the files, decodes into each worker's store and passes
over it, from the call of the job to its end; later epochs are what the tasks then take for shuffled
passes, the slower one's. The peer: torch's DataLoader with two processes, which open the same files
and call the same functions of Pillow, in every epoch; its first one starts the processes. All in
turns, in one session, with one torch thread a process.
"""

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import feed
import harness
import numpy as np
import torch
from PIL import Image, ImageOps
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from torch.utils.data import DataLoader, Dataset

from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.scale import Scale
from sparkdl.feed.schema import FeedSchema
from sparkdl.protocols import ColumnSpec

PHOTOGRAPHS, QUICK_PHOTOGRAPHS = 4_000, 400
WIDTH, HEIGHT, SIDE = 500, 375, 224
BATCH_SIZE = 64
EPOCHS = 4
"""The first and those later ones that are measured."""
PHOTO = ColumnSpec("c0", torch.uint8, (3, SIDE, SIDE), FITS["crop"], scale=Scale(torch.float32))
SCHEMA = FeedSchema((PHOTO,), ColumnSpec("c1", torch.int64))
TARGETS = {"first epoch": 1.0, "later epochs": 8.0}


class Files(Dataset[tuple[torch.Tensor, int]]):
    """Photographs as a user of torch opens them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as image:
            image.draft(None, (2 * SIDE, 2 * SIDE))
            upright = ImageOps.exif_transpose(image.convert("RGB"))
            pixels = np.asarray(ImageOps.fit(upright, (SIDE, SIDE)))
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float().div_(255), index % 10


def main() -> None:
    """Measures and reports."""
    chosen = harness.parse(harness.parser(__doc__), repeats=5)
    torch.set_num_threads(1)
    count = QUICK_PHOTOGRAPHS if chosen.quick else PHOTOGRAPHS
    with tempfile.TemporaryDirectory() as name:
        paths = draw(Path(name), count)
        rates = measure(Path(name), paths, chosen.repeats)
    claims = [
        harness.claim(
            f"{epochs} / DataLoader",
            rates[epochs]["ours"],
            rates[epochs]["DataLoader"],
            target=target,
            at_least=True,
        )
        for epochs, target in TARGETS.items()
    ]
    harness.report("images", claims, {"photographs": count, "images_per_second": rates})


def draw(folder: Path, count: int) -> list[Path]:
    """Photographs of smooth colours and some grain, about 40 KB each."""
    generator = np.random.default_rng(7)
    paths = []
    for index in range(count):
        coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        grain = generator.normal(0, 6, (HEIGHT, WIDTH, 1))
        pixels = np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8)
        paths.append(folder / f"{index:05}.jpg")
        Image.fromarray(pixels).save(paths[-1], quality=85)
    return paths


def measure(
    folder: Path, paths: Sequence[Path], repeats: int
) -> dict[str, dict[str, harness.Median]]:
    """Images/s of both in each kind of epoch, medians."""
    spark = feed.quiet_session()
    rows = spark.read.format("binaryFile").load(folder.as_uri())
    label = (F.col("length") % 10).cast("int").alias("label")
    frame = feed.as_fed(rows.select("content", label).coalesce(feed.WORKERS))
    turns = {"ours": partial(ours, frame), "DataLoader": partial(loader_epochs, paths)}
    measured = harness.interleave(turns, repeats=repeats, warmups=1)
    spark.stop()
    return {
        epochs: feed.rates(
            len(paths),
            {name: [each[index] for each in taken] for name, taken in measured.items()},
            f"{epochs}, {{}}",
        )
        for index, epochs in enumerate(TARGETS)
    }


def ours(frame: DataFrame) -> tuple[float, float]:
    """Seconds of a job of one epoch, and of one later epoch."""
    first, _ = feed.fed_job(partial(feed.fill_and_pass, SCHEMA, BATCH_SIZE, 1), frame)
    _, later = feed.fed_job(partial(feed.fill_and_pass, SCHEMA, BATCH_SIZE, EPOCHS), frame)
    return first, max(later)


def loader_epochs(paths: Sequence[Path]) -> tuple[float, float]:
    """Seconds of the first epoch and of a later one of a DataLoader."""
    started = time.perf_counter()
    loader: DataLoader[Any] = DataLoader(
        Files(paths),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=feed.WORKERS,
        persistent_workers=True,
    )
    for _ in loader:
        pass
    first = time.perf_counter() - started
    return first, feed.timed(loader)


if __name__ == "__main__":
    main()
