"""Steady-state samples/s of GradientAllReduce against torchrun + DDP, both over gloo on two cores.

Ours is the worker loop in two plain processes with the averager in this one, and rows from the
partition store; the peer runs under torchrun on tensors already in memory. Both train the same MLP
and small CNN with batches of 64 and one torch thread per process; the first epochs, in which things
are set up, are left out. The two take turns epoch by epoch, and the ratio is the median over pairs
of consecutive epochs; a repeat restarts all processes. ``--device cuda`` compares the two over NCCL
on two GPUs of this host.
"""

import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import digits
import epoch_turns
import harness
import networks
import torch
from torch import nn

from sparkdl import GradientAllReduce
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import Batch, ColumnSpec
from sparkdl.strategies import Run
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

WARM_UP = 2
EPOCHS = {"mlp": 24, "cnn": 12}
ROWS_A_RECORD_BATCH = 1_000
OURS, PEER = "sparkdl", "torchrun"
Rates = dict[str, list[float]]
"""Samples/s of each epoch, by side."""


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen = harness.parse(options, repeats=5, quick_repeats=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits.write(folder)
        turns = {
            network: partial(compare, folder, network, chosen.device)
            for network in networks.BUILDERS
        }
        measured = harness.interleave(turns, repeats=chosen.repeats)
    claims, medians = [], {}
    for network, repeats in measured.items():
        for side in (OURS, PEER):
            rates = [rate for repeat in repeats for rate in repeat[side]]
            name = f"{side}, {network}"
            medians[name] = harness.show(name, rates, unit="samples/s", digits=0)
        ratios = [
            ours / peer
            for repeat in repeats
            for ours, peer in zip(repeat[OURS], repeat[PEER], strict=True)
        ]
        name = f"sparkdl / torchrun + DDP, {network}"
        ratio = harness.show(name, ratios, unit="", digits=3)
        claims.append(harness.Claim(name=name, ratio=ratio, target=0.95, at_least=True))
    detail = {
        "median_samples_per_second": medians,
        "ratio_of_each_repeat": {
            network: [round(_ratio(repeat), 3) for repeat in repeats]
            for network, repeats in measured.items()
        },
    }
    harness.report("all_reduce_throughput", claims, detail)


def compare(folder: Path, network: str, device: str) -> Rates:
    """Trains both; returns samples/s of each epoch, for both workers together."""
    epochs = EPOCHS[network]
    with tempfile.TemporaryDirectory() as place:
        address = str(Path(place) / "turns")
        sides = {
            OURS: partial(ours, folder, network, WARM_UP + epochs, device, address),
            PEER: partial(peer, folder, network, WARM_UP + epochs, device, address),
        }
        seconds = epoch_turns.measure(
            address, sides, ranks=digits.WORKERS, warm_up=WARM_UP, epochs=epochs
        )
    rates = {side: [digits.TRAIN_ROWS / each for each in all_] for side, all_ in seconds.items()}
    print(f"  {network}: ratio {_ratio(rates):.3f}", flush=True)
    return rates


def _ratio(rates: Rates) -> float:
    return statistics.median(a / b for a, b in zip(rates[OURS], rates[PEER], strict=True))


@dataclass(frozen=True)
class InTurns(GradientAllReduce):
    """``GradientAllReduce`` in which each epoch waits for its turn."""

    address: str = ""

    def train_epoch(self, run: Run, state: Any, batches: Iterable[Batch]) -> None:
        """Train an epoch as usual, once it may begin."""
        turn = epoch_turns.turn_of(self.address, OURS)
        turn.wait()
        super().train_epoch(run, state, batches)
        turn.done()


def ours(folder: Path, network: str, epochs: int, device: str, address: str) -> None:
    """Trains ``epochs`` epochs on two workers."""
    job = Job(
        model=networks.BUILDERS[network],
        loss=nn.CrossEntropyLoss(),
        optimizer=digits.make_optimizer,
        strategy=InTurns(address=address),
        schema=FeedSchema(
            (ColumnSpec("features", torch.float32, (digits.PIXELS,)),),
            ColumnSpec("label", torch.int64),
        ),
        epochs=epochs,
        batch_size=digits.BATCH_SIZE,
        seed=7,
        deadline_s=epoch_turns.PATIENCE_S,
    )
    rows = [digits.read_rows(digits.shard_path(folder, rank)) for rank in range(digits.WORKERS)]
    shards = [
        batches_of(ROWS_A_RECORD_BATCH, features=features.numpy(), label=labels.numpy())
        for features, labels in rows
    ]
    devices = [device if device == "cpu" else f"{device}:{rank}" for rank in range(digits.WORKERS)]
    run_world(job, shards, ranks_as="processes", devices=devices)


def peer(folder: Path, network: str, epochs: int, device: str, address: str) -> None:
    """Trains as many epochs under torchrun."""
    script = harness.FOLDER / "peers" / "torchrun_ddp.py"
    arguments = (str(folder), network, str(epochs), device, address, PEER)
    harness.torchrun(script, *arguments, processes=digits.WORKERS)


if __name__ == "__main__":
    main()
