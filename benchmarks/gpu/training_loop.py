"""Whole trainings of a small network on one GPU, against loops that one would write by hand.

A step takes a fraction of a millisecond, so what is measured is what goes on around it: gathering
rows, copying them, adding up losses, averaging every 20 steps with the driver. The hand-written
loops take the same steps: one gathers each minibatch from rows in the CPU's memory into pinned
memory and copies it, as the feed has to; the other has all rows on the GPU from the start. Needs
only torch, pyarrow and cloudpickle, no Spark and no Java. The last line is a JSON object.

    python benchmarks/gpu/training_loop.py
    python benchmarks/gpu/training_loop.py --toy     # small and on the CPU: does it run?
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

TARGET = 0.85
WIDTH, HIDDEN, CLASSES = 784, 512, 10
PERIOD = 20
ADAM = partial(torch.optim.Adam, lr=1e-3)


@dataclass(frozen=True)
class Setting:
    """The sizes of everything.

    Attributes:
        device: a torch device.
        rows: rows of an epoch.
        batch_size: rows of a minibatch.
        epochs: of one training; the first is not counted.
        repeats: trainings of each contender.
    """

    device: str
    rows: int
    batch_size: int
    epochs: int
    repeats: int


FULL = Setting(device="cuda:0", rows=100_000, batch_size=256, epochs=4, repeats=3)
TOY = Setting(device="cpu", rows=600, batch_size=32, epochs=2, repeats=1)

Rows = tuple[Tensor, Tensor]


def main() -> None:
    """Measures and reports."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--toy", action="store_true", help="small and on the CPU: no result")
    setting = TOY if options.parse_args().toy else FULL
    if setting.device != "cpu" and not torch.cuda.is_available():
        options.error("torch sees no GPU here; --toy runs without one")
    rows = made_up(setting)
    on_device = rows[0].to(setting.device), rows[1].to(setting.device)
    contenders: dict[str, Callable[[], float]] = {
        "sparkdl": partial(ours, setting, rows),
        "by hand, rows copied": partial(by_hand, setting, rows, copied),
        "by hand, rows on the GPU": partial(by_hand, setting, on_device, resident),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(setting.repeats):
        for name, measure in contenders.items():
            rates[name].append(measure())
            print(f"{name}: {rates[name][-1]:,.0f} rows/s", flush=True)
    medians = {name: statistics.median(each) for name, each in rates.items()}
    report = {
        "benchmark": "gpu_training_loop",
        "ratio": round(medians["sparkdl"] / medians["by hand, rows copied"], 4),
        "target": TARGET,
        "detail": {
            "toy": setting is TOY,
            "rows_per_second": rates,
            "device": torch.cuda.get_device_name() if setting.device != "cpu" else "cpu",
            "torch": torch.__version__,
        },
    }
    print(json.dumps(report), flush=True)


def network() -> nn.Module:
    """784 numbers to 10 classes."""
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )


def made_up(setting: Setting) -> Rows:
    """Features (rows, 784) and classes (rows,)."""
    generator = torch.Generator().manual_seed(7)
    features = torch.rand(setting.rows, WIDTH, generator=generator)
    return features, torch.randint(CLASSES, (setting.rows,), generator=generator)


def ours(setting: Setting, rows: Rows) -> float:
    """Rows/s of a run's epochs but the first, with one rank in a process of its own."""
    features, classes = (each.numpy() for each in rows)
    job = Job(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=ADAM,
        strategy=ParameterAveraging(PERIOD),
        schema=FeedSchema(
            (ColumnSpec("x", torch.float32, (WIDTH,)),), ColumnSpec("y", torch.int64)
        ),
        epochs=setting.epochs,
        batch_size=setting.batch_size,
        seed=7,
        deadline_s=300.0,
    )
    shard = batches_of(2048, x=np.ascontiguousarray(features), y=classes)
    outcome = run_world(job, [shard], ranks_as="processes", devices=[setting.device])
    steady = outcome.history[1:]
    return sum(epoch.examples for epoch in steady) / sum(epoch.seconds for epoch in steady)


def by_hand(
    setting: Setting, rows: Rows, minibatches: Callable[[Setting, Rows], Iterator[Rows]]
) -> float:
    """Rows/s of a plain loop's epochs but the first."""
    module = network().to(setting.device)
    optimizer = ADAM(module.parameters())
    loss_of = nn.CrossEntropyLoss()
    seconds = []
    for _ in range(setting.epochs):
        _wait_for(setting.device)
        started = time.perf_counter()
        total = torch.zeros((), device=setting.device)
        for features, classes in minibatches(setting, rows):
            optimizer.zero_grad()
            loss = loss_of(module(features), classes)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        float(total)
        seconds.append(time.perf_counter() - started)
    return setting.rows * (setting.epochs - 1) / sum(seconds[1:])


def copied(setting: Setting, rows: Rows) -> Iterator[Rows]:
    """An epoch's minibatches, each gathered into pinned memory and copied to the device."""
    pinned = setting.device != "cpu"
    for places in torch.randperm(setting.rows).split(setting.batch_size):
        minibatch = []
        for tensor in rows:
            room = torch.empty(
                (len(places), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned
            )
            torch.index_select(tensor, 0, places, out=room)
            minibatch.append(room.to(setting.device, non_blocking=True))
        yield minibatch[0], minibatch[1]


def resident(setting: Setting, rows: Rows) -> Iterator[Rows]:
    """An epoch's minibatches, gathered from rows that are on the device."""
    features, classes = rows
    order = torch.randperm(setting.rows, device=setting.device)
    for places in order.split(setting.batch_size):
        yield features[places], classes[places]


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
