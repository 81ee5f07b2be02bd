"""Images/s of photographs in a folder, in the first epoch and in later ones, against a DataLoader.

4,000 JPEGs of 500 x 375 pixels become float32 tensors of 3 x 224 x 224. Ours: a Spark job of two
tasks lists the folder (binaryFile), opens the files, decodes into each worker's store and passes
over it, from the call of the job to its end; later epochs are what the tasks then take for shuffled
passes, the slower one's. The peer: torch's DataLoader with two processes, which open the same files
and call the same functions of Pillow, in every epoch; its first one starts the processes. All in
turns, in one session, with one torch thread a process.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import feed
import harness
import numpy as np
import pyarrow as pa
import torch
from PIL import Image, ImageOps
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch.utils.data import DataLoader, Dataset

from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.scale import Scale
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import Feed
from sparkdl.feed.record_batches.packed import unpacked
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.launch.worker_rows import Workers, worker_frame
from sparkdl.spark.rows.columns import input_column
from sparkdl.spark.rows.packing import small_record_batches

PHOTOGRAPHS, QUICK_PHOTOGRAPHS = 4_000, 400
WIDTH, HEIGHT, SIDE = 500, 375, 224
BATCH_SIZE = 64
LATER = range(2, 5)
"""The later epochs that are measured."""
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
    chosen = harness.arguments(__doc__, repeats=5)
    torch.set_num_threads(1)
    count = QUICK_PHOTOGRAPHS if chosen.quick else PHOTOGRAPHS
    with tempfile.TemporaryDirectory() as name:
        paths = draw(Path(name), count)
        rates = measure(Path(name), paths, chosen.repeats)
    claims = [
        harness.claim(
            f"{epochs} / DataLoader",
            rates["ours"][epochs],
            rates["DataLoader"][epochs],
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


def measure(folder: Path, paths: Sequence[Path], repeats: int) -> dict[str, dict[str, float]]:
    """Images/s of both, medians."""
    os.environ.update(harness.child_environment())
    spark = harness.session(f"local-cluster[{feed.WORKERS},1,2048]", feed.CONF)
    spark.sparkContext.setLogLevel("OFF")
    frame = photographs(spark, folder)
    turns = {"ours": partial(ours, frame), "DataLoader": partial(loader_epochs, paths)}
    measured = harness.interleave(turns, repeats=repeats, warmups=1)
    spark.stop()
    return {
        name: {
            epochs: feed.rate(
                len(paths), f"{epochs}, {name}", [each[index] for each in taken], digits=2
            )
            for index, epochs in enumerate(TARGETS)
        }
        for name, taken in measured.items()
    }


def photographs(spark: SparkSession, folder: Path) -> DataFrame:
    """The folder's rows as workers get them."""
    rows = spark.read.format("binaryFile").load(folder.as_uri())
    label = (F.col("length") % 10).cast("int").alias("label")
    frame = rows.select("content", label).coalesce(feed.WORKERS)
    workers = Workers(
        frame=frame,
        columns=tuple(input_column(frame, name, "featuresCols") for name in frame.columns),
        num_workers=feed.WORKERS,
        shuffle="exchange",
        device="cpu",
        description="benchmark",
        network=network_of(spark),
    )
    return worker_frame(workers)


def ours(frame: DataFrame) -> tuple[float, float]:
    """Seconds of a job of one epoch, and of one later epoch."""
    first = feed.fed_job(frame, partial(feed.fill_and_pass, SCHEMA))
    with small_record_batches(frame.sparkSession):
        rows = frame.mapInArrow(fill_and_go_on, "seconds double").collect()
    return first, max(row["seconds"] for row in rows)


def fill_and_go_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fills a store, passes over it, and measures later epochs."""
    torch.set_num_threads(1)
    directory = Path(tempfile.gettempdir())
    with Feed(SCHEMA, batch_size=BATCH_SIZE, seed=7, rank=0, directory=directory) as store:
        store.fill(map(unpacked, batches))
        feed.timed(store.epoch(1))
        seconds = [feed.timed(store.epoch(epoch)) for epoch in LATER]
    yield pa.record_batch([pa.array([float(np.median(seconds))])], names=["seconds"])


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
