"""Training on one GPU: ``resnet50`` and ``rounds``.

``resnet50``: ResNet-50 in bf16, fed by the feed, against the same loop on one constant minibatch;
then one fit with GradientAllReduce and a single rank, which takes the whole NCCL path. Rows are 3 x
224 x 224 bytes each, copied to the GPU from pinned memory by the feed's own thread.

``rounds``: rounds of replicas on a GPU, against the same rounds of replicas on the CPU. A round of
a replica on a GPU also copies its state to the CPU's memory and the center back. A rank trains on
next to nothing, so that a step costs a round; two ranks, processes that share the GPU in turns, are
in the detail.

Needs only torch, pyarrow and cloudpickle, no Spark and no Java. With ``--quick`` everything is tiny
and on the CPU: does it run?
"""

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice, pairwise, product, repeat
from pathlib import Path
from typing import Any

import digits
import harness
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from sparkdl import encodings
from sparkdl.events import WindowReport
from sparkdl.feed.feed import Feed
from sparkdl.feed.schema import FeedSchema
from sparkdl.protocols import Batch, ColumnSpec
from sparkdl.replica import Replica
from sparkdl.strategies import GradientAllReduce, ParameterAveraging
from sparkdl.testing import run_world

RESNET_TARGET, ROUND_TARGET = 0.95, 1.25
CLASSES = 1_000
BLOCKS = (3, 4, 6, 3)
EXPANSION = 4
SIZES = (25_000_000, 1_000_000, 10_000)
QUICK_SIZES = (10_000, 100)
ROUNDS = 16
OPTIMIZER = partial(digits.make_optimizer, lr=0.01)


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
    """

    device: str
    size: int
    width: int
    rows: int
    batch_size: int
    steps: int


FULL = Setting(device="cuda:0", size=224, width=64, rows=8_192, batch_size=256, steps=60)
QUICK = Setting(device="cpu", size=32, width=4, rows=24, batch_size=8, steps=3)


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
    """Measures what is asked for, and reports."""
    parts: dict[str, tuple[harness.Part, int, int]] = {
        "resnet50": (resnet50, 5, 1),
        "rounds": (rounds, 3, 1),
    }
    harness.measure_parts("gpu", harness.parser(__doc__), parts)


def device_of(chosen: argparse.Namespace) -> str:
    """Returns where to measure."""
    if not chosen.quick and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; --quick runs without one")
    return "cpu" if chosen.quick else "cuda:0"


def described(device: str) -> dict[str, Any]:
    """Returns what the last line says of the device."""
    return {"device": device if device == "cpu" else torch.cuda.get_device_name()}


def resnet50(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures ResNet-50."""
    device = device_of(chosen)
    setting = QUICK if chosen.quick else FULL
    table = images(setting)
    rates = feed_against_constant(setting, table, chosen.repeats)
    alone = all_reduce_alone(setting, table)
    medians = harness.show_each(rates, unit="images/s", digits=1)
    harness.show("GradientAllReduce, one rank", [alone], unit="images/s", digits=1)
    claim = harness.claim(
        "images/s with the feed / with one constant minibatch",
        medians["feed"],
        medians["constant"],
        target=RESNET_TARGET,
        at_least=True,
    )
    measured = {"images_per_second": rates, "all_reduce_one_rank_images_per_second": alone}
    return [claim], measured | described(device)


def rounds(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures rounds."""
    device = device_of(chosen)
    devices = [*dict.fromkeys(("cpu", device))]
    sizes = QUICK_SIZES if chosen.quick else SIZES
    medians: dict[str, dict[str, harness.Median]] = {}
    for numel, ranks in product(sizes, (1, 2)):
        turns = {each: partial(seconds_of_rounds, numel, each, ranks) for each in devices}
        found = harness.interleave(turns, repeats=chosen.repeats)
        name = f"{numel:,} parameters, {ranks} ranks"
        milliseconds = {each: [1e3 * s for run in found[each] for s in run] for each in devices}
        medians[name] = harness.show_each(milliseconds, f"{name}, {{}}", unit="ms", digits=2)
    largest = medians[f"{sizes[0]:,} parameters, 1 ranks"]
    claim = harness.claim(
        f"a round of {sizes[0]:,} parameters, replica on the GPU / on the CPU",
        largest[device],
        largest["cpu"],
        target=ROUND_TARGET,
    )
    return [claim], {"milliseconds_a_round": medians} | described(device)


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


def feed_against_constant(
    setting: Setting, table: list[pa.RecordBatch], repeats: int
) -> dict[str, list[float]]:
    """Images/s with the feed's minibatches, and with one that is already on the device."""
    torch.manual_seed(7)
    replica = Replica(
        ResNet50(setting.width),
        OPTIMIZER,
        nn.CrossEntropyLoss(),
        setting.device,
        precision="bf16",
    )
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
        turns = {
            source: partial(images_a_second, replica, batches, setting)
            for source, batches in sources.items()
        }
        return harness.interleave(turns, repeats=repeats, warmups=1)


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
    job = digits.job(
        GradientAllReduce(),
        model=partial(ResNet50, setting.width),
        optimizer=OPTIMIZER,
        schema=schema(setting),
        epochs=3,
        batch_size=setting.batch_size,
        precision="bf16",
    )
    outcome = run_world(job, [table], ranks_as="processes", devices=[setting.device])
    steady = outcome.history[1:]
    return sum(epoch.examples for epoch in steady) / sum(epoch.seconds for epoch in steady)


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


class OfSize(nn.Module):
    """So many parameters, of which a step needs one."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(numel))

    def forward(self, features: Tensor) -> Tensor:
        """(n,) -> (n,)."""
        return features * self.values[0]


def seconds_of_rounds(numel: int, device: str, ranks: int) -> list[float]:
    """Seconds of each round, as the driver sees its windows committed."""
    rows = pa.table({"x": np.zeros(ROUNDS, np.float32), "y": np.zeros(ROUNDS, np.float32)})
    job = digits.job(
        ParameterAveraging(1),
        model=partial(OfSize, numel),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.0),
        schema=FeedSchema((ColumnSpec("x", torch.float32),), ColumnSpec("y", torch.float32)),
        epochs=1,
        batch_size=1,
    )
    came: list[float] = []

    def note(event: object) -> None:
        if isinstance(event, WindowReport) and event.rank == 0:
            came.append(time.perf_counter())

    shards = [rows.to_batches()] * ranks
    run_world(job, shards, ranks_as="processes", devices=[device] * ranks, on_event=note)
    return [after - before for before, after in pairwise(came[1:-1])]


if __name__ == "__main__":
    main()
