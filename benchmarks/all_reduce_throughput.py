"""Steady-state samples/s of GradientAllReduce against torchrun + DDP, both over gloo on two cores.

Ours is the worker loop in two plain processes with the averager in this one, rows from the
partition store; the peer runs under torchrun on tensors already in memory. The same MLP and small
CNN, batches of 64, one torch thread a process; the first epoch, in which things are set up, is
left out. ``--device cuda`` compares the two over NCCL on two GPUs of this host.
"""

import tempfile
from functools import partial
from pathlib import Path

import digits
import harness
import networks
import torch
from torch import nn

from sparkdl import GradientAllReduce
from sparkdl.feed.columns import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

EPOCHS = {"mlp": 16, "cnn": 6}
ROWS_A_RECORD_BATCH = 1_000


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen = harness.parse(options, repeats=5, quick_repeats=2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits.write(folder)
        turns = {
            f"{side}, {network}": partial(run, folder, network, EPOCHS[network], chosen.device)
            for network in networks.BUILDERS
            for side, run in (("sparkdl", ours), ("torchrun", peer))
        }
        measured = harness.interleave(turns, repeats=chosen.repeats)
    medians = {
        name: harness.show(name, rates, unit="samples/s", digits=0)
        for name, rates in measured.items()
    }
    claims = [
        harness.Claim(
            name=f"sparkdl / torchrun + DDP, {network}",
            ratio=medians[f"sparkdl, {network}"] / medians[f"torchrun, {network}"],
            target=0.95,
            at_least=True,
        )
        for network in networks.BUILDERS
    ]
    detail = {"median_samples_per_second": medians, "samples_per_second": measured}
    harness.report("all_reduce_throughput", claims, detail)


def ours(folder: Path, network: str, epochs: int, device: str) -> float:
    """Trains ``epochs`` epochs after a first one; returns samples/s of both workers together."""
    job = Job(
        model=networks.BUILDERS[network],
        loss=nn.CrossEntropyLoss(),
        optimizer=digits.make_optimizer,
        strategy=GradientAllReduce(),
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
    devices = [device if device == "cpu" else f"{device}:{rank}" for rank in range(digits.WORKERS)]
    steady = run_world(job, shards, ranks_as="processes", devices=devices).history[1:]
    return sum(epoch.examples for epoch in steady) / sum(epoch.seconds for epoch in steady)


def peer(folder: Path, network: str, epochs: int, device: str) -> float:
    """Trains under torchrun; returns samples/s of both processes together."""
    script = harness.FOLDER / "peers" / "torchrun_ddp.py"
    arguments = (str(folder), network, str(epochs), device)
    result = harness.torchrun(script, *arguments, processes=digits.WORKERS)
    return float(result["samples_per_second"])


if __name__ == "__main__":
    main()
