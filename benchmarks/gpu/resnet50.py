"""ResNet-50 in bf16 on one GPU: fed by the feed, against the same loop on one constant minibatch.

Then one fit with GradientAllReduce and a single rank, which takes the whole NCCL path. Needs only
torch, pyarrow and cloudpickle, no Spark and no Java. Rows are 3 x 224 x 224 bytes each, copied to
the GPU from pinned memory by the feed's own thread. The last line is a JSON object.

    python benchmarks/gpu/resnet50.py
    python benchmarks/gpu/resnet50.py --toy     # a few steps of a tiny one on the CPU: does it run?
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice, repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from sparkdl import encodings
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import Feed
from sparkdl.protocols import Batch, ColumnSpec
from sparkdl.replica import Replica
from sparkdl.strategies import GradientAllReduce
from sparkdl.testing import run_world
from sparkdl.worker import Job

TARGET = 0.95
CLASSES = 1_000
BLOCKS = (3, 4, 6, 3)
EXPANSION = 4


@dataclass(frozen=True)
class Setting:
    """The sizes of everything.

    Attributes:
        device: a torch device.
        size: height and width of an image.
        width: channels after the first convolution; 64 for ResNet-50.
        rows: images in the store.
        batch_size: images per minibatch.
        steps: optimizer steps of one measurement.
        repeats: measurements of each contender.
    """

    device: str
    size: int
    width: int
    rows: int
    batch_size: int
    steps: int
    repeats: int


FULL = Setting(device="cuda:0", size=224, width=64, rows=8_192, batch_size=256, steps=60, repeats=5)
TOY = Setting(device="cpu", size=32, width=4, rows=24, batch_size=8, steps=3, repeats=1)


class Bottleneck(nn.Module):
    """He et al. 2015, figure 5: 1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = EXPANSION * inner
        self.path = nn.Sequential(
            *_convolution(channels, inner, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(inner, inner, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(inner, outer, 1, 1),
        )
        same = channels == outer and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(channels, outer, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) -> (n, 4 inner, h / stride, w / stride)."""
        return torch.relu(self.path(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50 on images of bytes; 25.6 M parameters at ``width`` 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        channels, layers = width, []
        for stage, blocks in enumerate(BLOCKS):
            inner = width << stage
            for block in range(blocks):
                layers.append(Bottleneck(channels, inner, 2 if stage and not block else 1))
                channels = EXPANSION * inner
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, size, size) uint8 -> (n, 1000) logits."""
        x = images.to(torch.float32, memory_format=torch.channels_last) / 255.0
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return logits


def _convolution(channels: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(
        channels, outputs, kernel, stride=stride, padding=kernel // 2, bias=False
    )
    return [convolution, nn.BatchNorm2d(outputs)]


def main() -> None:
    """Measures and reports."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--toy", action="store_true", help="tiny and on the CPU: no result")
    setting = TOY if options.parse_args().toy else FULL
    if setting.device != "cpu" and not torch.cuda.is_available():
        options.error("torch sees no GPU here; --toy runs without one")
    table = images(setting)
    rates = feed_against_constant(setting, table)
    alone = all_reduce_alone(setting, table)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in {**medians, "GradientAllReduce, one rank": alone}.items():
        print(f"{name}: {rate:,.1f} images/s", flush=True)
    report = {
        "benchmark": "gpu_resnet50",
        "ratio": round(medians["feed"] / medians["constant"], 4),
        "target": TARGET,
        "detail": {
            "toy": setting is TOY,
            "images_per_second": rates,
            "all_reduce_one_rank_images_per_second": alone,
            "device": torch.cuda.get_device_name() if setting.device != "cpu" else "cpu",
            "torch": torch.__version__,
        },
    }
    print(json.dumps(report), flush=True)


def images(setting: Setting) -> list[pa.RecordBatch]:
    """Random images as Spark would pass them: their bytes, and a label."""
    generator = np.random.default_rng(7)
    octets = 3 * setting.size**2
    values = generator.integers(0, 256, setting.rows * octets, dtype=np.uint8).tobytes()
    cut = [values[start : start + octets] for start in range(0, len(values), octets)]
    labels = generator.integers(0, CLASSES, setting.rows)
    table = pa.table({"image": pa.array(cut, pa.binary()), "label": labels})
    batches: list[pa.RecordBatch] = table.to_batches(max_chunksize=512)
    return batches


def schema(setting: Setting) -> FeedSchema:
    """Bytes to uint8 tensors of shape (3, size, size)."""
    image = ColumnSpec("image", torch.uint8, (3, setting.size, setting.size), encodings.BYTES)
    return FeedSchema((image,), ColumnSpec("label", torch.int64))


def feed_against_constant(setting: Setting, table: list[pa.RecordBatch]) -> dict[str, list[float]]:
    """Images/s with the feed's minibatches, and with one that is already on the device."""
    torch.manual_seed(7)
    replica = Replica(
        ResNet50(setting.width),
        partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        nn.CrossEntropyLoss(),
        setting.device,
        precision="bf16",
    )
    rates: dict[str, list[float]] = {"constant": [], "feed": []}
    with (
        tempfile.TemporaryDirectory() as name,
        Feed(
            schema(setting),
            batch_size=setting.batch_size,
            seed=7,
            rank=0,
            directory=Path(name),
            device=setting.device,
        ) as feed,
    ):
        feed.fill(table)
        (constant,) = islice(feed.epoch(1), 1)
        endless: Iterator[Batch] = chain.from_iterable(feed.epoch(epoch) for epoch in count(2))
        sources: dict[str, Iterable[Batch]] = {"constant": repeat(constant), "feed": endless}
        for turn in range(setting.repeats + 1):
            for source, batches in sources.items():
                rate = images_a_second(replica, batches, setting)
                if turn:  # the first turn is warm-up
                    rates[source].append(rate)
    return rates


def images_a_second(replica: Replica, batches: Iterable[Batch], setting: Setting) -> float:
    """Trains ``steps`` steps; returns images/s."""
    _wait_for(setting.device)
    started, seen = time.perf_counter(), 0
    for batch in islice(batches, setting.steps):
        replica.step(batch)
        seen += batch.examples
    _wait_for(setting.device)
    return seen / (time.perf_counter() - started)


def all_reduce_alone(setting: Setting, table: list[pa.RecordBatch]) -> float:
    """Images/s of a fit with one rank: rendezvous, NCCL (gloo on CPUs), buckets, the driver."""
    job = Job(
        model=partial(ResNet50, setting.width),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        strategy=GradientAllReduce(),
        schema=schema(setting),
        epochs=3,
        batch_size=setting.batch_size,
        seed=7,
        deadline_s=300.0,
        precision="bf16",
    )
    outcome = run_world(job, [table], ranks_as="processes", devices=[setting.device])
    steady = outcome.history[1:]
    return sum(epoch.examples for epoch in steady) / sum(epoch.seconds for epoch in steady)


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
