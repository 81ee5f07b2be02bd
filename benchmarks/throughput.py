"""Steady-state samples/s of the MLP on two processes, against DDP and against no exchange at all.

Ours is the worker loop in two plain processes with the averager in this one, without Spark, at
periods 1, 5 and 20 and with momentum averaged too (the default). The peers run under torchrun on
in-memory tensors: DistributedDataParallel over gloo, and two processes that never exchange. All
have one torch thread per process; the first epoch, in which things are set up, is left out.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import digits
import harness
import torch
from torch import nn

from sparkdl import ParameterAveraging
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

PERIODS = (1, 5, 20)
ROWS_A_RECORD_BATCH = 1_000
EPOCHS = 20


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=5, quick_repeats=2)
    epochs = 8 if chosen.quick else EPOCHS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits.write(folder)
        turns: dict[str, Callable[[], float]] = {
            f"period {period}": partial(ours, folder, period, epochs) for period in PERIODS
        }
        turns["DDP"] = partial(peer, folder, "ddp", epochs)
        turns["no exchange"] = partial(peer, folder, "none", epochs)
        measured = harness.interleave(turns, repeats=chosen.repeats)
    medians = {
        name: harness.show(name, rates, unit="samples/s", digits=0)
        for name, rates in measured.items()
    }
    claims = [
        harness.Claim(
            name="period 5 / DDP",
            ratio=medians["period 5"] / medians["DDP"],
            target=1.5,
            at_least=True,
        ),
        harness.Claim(
            name="period 20 / no exchange",
            ratio=medians["period 20"] / medians["no exchange"],
            target=0.85,
            at_least=True,
        ),
    ]
    detail = {"median_samples_per_second": medians, "samples_per_second": measured}
    harness.report("throughput", claims, detail)


def ours(folder: Path, period: int, epochs: int) -> float:
    """Trains ``epochs`` epochs after a first one; returns samples/s of both workers together."""
    job = Job(
        model=digits.build_mlp,
        loss=nn.CrossEntropyLoss(),
        optimizer=digits.make_optimizer,
        strategy=ParameterAveraging(period=period),
        schema=FeedSchema(
            (ColumnSpec("features", torch.float32, (digits.PIXELS,)),),
            ColumnSpec("label", torch.int64),
        ),
        epochs=1 + epochs,
        batch_size=digits.BATCH_SIZE,
        seed=7,
        deadline_s=120.0,
    )
    rows = [digits.read_rows(digits.shard_path(folder, rank)) for rank in range(digits.WORKERS)]
    shards = [
        batches_of(ROWS_A_RECORD_BATCH, features=features.numpy(), label=labels.numpy())
        for features, labels in rows
    ]
    steady = run_world(job, shards, ranks_as="processes").history[1:]
    return sum(epoch.examples for epoch in steady) / sum(epoch.seconds for epoch in steady)


def peer(folder: Path, exchange: str, epochs: int) -> float:
    """Trains under torchrun; returns samples/s of both processes together."""
    script = harness.FOLDER / "peers" / "ddp.py"
    result = harness.torchrun(script, str(folder), str(epochs), exchange, processes=digits.WORKERS)
    return float(result["samples_per_second"])


if __name__ == "__main__":
    main()
