"""Steady-state samples/s on two cores: ours, torchrun + DDP over gloo, no exchange, one process.

Ours is the worker loop in two plain processes with the averager in this one, without Spark, on rows
from the partition store: ``ParameterAveraging`` at periods 5 and 20 on the MLP, and
``GradientAllReduce`` on the MLP and a small CNN. The others have their tensors in memory: DDP, two
processes that never exchange, and one process that trains on all rows with one thread and with two.
All train the same 8,000 rows an epoch in minibatches of 64, and whatever has two processes has one
thread in each. All sides of a network are alive at once and take turns epoch by epoch: two
processes that exchange gradients on two cores are at the mercy of whatever else runs there, and of
where the system puts their threads, and runs of some seconds, one after another, may differ by a
third. The first epochs, in which things are set up, are left out. A ratio is the median over epochs
that follow one another; a repeat restarts all processes. ``--device cuda`` compares
``GradientAllReduce`` with DDP over NCCL on two GPUs of this host, and nothing else.
"""

import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import digits
import harness
from peers import ddp

from sparkdl import GradientAllReduce, ParameterAveraging
from sparkdl.protocols import Batch
from sparkdl.strategies import Run, Strategy
from sparkdl.testing import batches_of, run_world

PATIENCE_S = 120.0
"""Seconds for all processes to start, and for an epoch."""
WARM_UP = 2
EPOCHS = {"mlp": 24, "cnn": 12}
ROWS_A_RECORD_BATCH = 1_000
ALL_REDUCE, DDP, ALONE = "all-reduce", "DDP", "one process"
PERIODS = {"period 5": 5, "period 20": 20}
PEERS = {
    DDP: ("ddp", digits.WORKERS, 1),
    "no exchange": ("none", digits.WORKERS, 1),
    ALONE: ("none", 1, 1),
    f"{ALONE}, two threads": ("none", 1, 2),
}
"""What ranks of plain torch exchange, how many there are, and the threads of each."""
CLAIMS = {
    "mlp": [("period 5", DDP, 1.5), ("period 20", "no exchange", 0.85), (ALL_REDUCE, DDP, 0.95)],
    "cnn": [(ALL_REDUCE, DDP, 0.95)],
}
Side = tuple[int, Callable[[], Any]]
"""How many ranks train together, and what runs all of them until they end, in a thread."""
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
            network: partial(compare, folder, network, chosen.device, 4 if chosen.quick else epochs)
            for network, epochs in EPOCHS.items()
        }
        measured = harness.interleave(turns, repeats=chosen.repeats)
    medians: dict[str, dict[str, harness.Median]] = {}
    claims = []
    for network, repeats in measured.items():
        rates = {side: [rate for each in repeats for rate in each[side]] for side in repeats[0]}
        medians[network] = harness.show_each(rates, f"{network}, {{}}", unit="samples/s", digits=0)
        if ALONE in rates:
            ratios = {side: _ratios(rates, side, ALONE) for side in rates if side != ALONE}
            harness.show_each(ratios, f"{network}, {{}} / {ALONE}", unit="", digits=3)
        for ours, peer, target in CLAIMS[network]:
            if ours in rates and peer in rates:
                name = f"{ours} / {peer}, {network}"
                claims.append(
                    harness.Claim(
                        name=name,
                        ratio=harness.show(name, _ratios(rates, ours, peer), unit="", digits=3),
                        target=target,
                        at_least=True,
                        ours=medians[network][ours],
                        peer=medians[network][peer],
                    )
                )
    harness.report("throughput", claims, {"median_samples_per_second": medians})


def _ratios(rates: Rates, ours: str, peer: str) -> list[float]:
    return [a / b for a, b in zip(rates[ours], rates[peer], strict=True)]


def compare(folder: Path, network: str, device: str, epochs: int) -> Rates:
    """Trains all sides; returns samples/s of each epoch, for all ranks of a side together."""
    with tempfile.TemporaryDirectory() as place:
        address = str(Path(place) / "turns")
        given = (folder, network, WARM_UP + epochs, device, address)
        strategies: dict[str, Strategy[Any]] = {
            ALL_REDUCE: AllReduceInTurns(address=address, side=ALL_REDUCE)
        }
        if network == "mlp" and device == "cpu":
            strategies |= {
                side: AveragingInTurns(period, address=address, side=side)
                for side, period in PERIODS.items()
            }
        sides: dict[str, Side] = {
            side: (digits.WORKERS, partial(ours, strategy, *given[:-1]))
            for side, strategy in strategies.items()
        }
        sides |= {
            side: (ranks, partial(peer, side, ranks, threads, exchange, *given))
            for side, (exchange, ranks, threads) in PEERS.items()
            if device == "cpu" or side == DDP
        }
        seconds = in_turns(address, sides, epochs)
    return {side: [digits.TRAIN_ROWS / each for each in all_] for side, all_ in seconds.items()}


def in_turns(address: str, sides: Mapping[str, Side], epochs: int) -> dict[str, list[float]]:
    """Train every side and measure its epochs.

    Args:
        address: path of a socket to create.
        sides: by name.
        epochs: how many are measured, after the first ones.

    Returns:
        Seconds of each epoch, by side.
    """
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(address)
        server.listen()
        server.settimeout(PATIENCE_S)
        pool = stack.enter_context(ThreadPoolExecutor(len(sides)))
        running = [pool.submit(train) for _, train in sides.values()]
        members: dict[str, list[socket.socket]] = {side: [] for side in sides}
        for _ in range(sum(ranks for ranks, _ in sides.values())):
            member = stack.enter_context(server.accept()[0])
            member.settimeout(PATIENCE_S)
            members[member.recv(100).decode()].append(member)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for epoch in range(WARM_UP + epochs):
            # The order alternates, in case it matters.
            for side in list(sides)[:: 1 if epoch % 2 else -1]:
                seconds[side].append(_train_epoch(members[side]))
        for training in running:
            training.result(PATIENCE_S)
    return {side: all_[WARM_UP:] for side, all_ in seconds.items()}


def _train_epoch(members: list[socket.socket]) -> float:
    start = time.perf_counter()
    for member in members:
        member.sendall(ddp.GO)
    for member in members:
        if member.recv(1) != ddp.DONE:
            raise EOFError("a rank ended in the middle of an epoch")
    return time.perf_counter() - start


@dataclass(frozen=True)
class _InTurns:
    """A strategy of which each epoch waits for its turn.

    Args:
        address: path of the socket of ``in_turns``.
        side: the side that the worker belongs to.
    """

    address: str = ""
    side: str = ""

    def train_epoch(self, run: Run, state: Any, batches: Iterable[Batch]) -> None:
        """Train an epoch as usual, once it may begin."""
        turn = ddp.turn_of(self.address, self.side)
        turn.wait()
        super().train_epoch(run, state, batches)  # type: ignore[misc]
        turn.done()


@dataclass(frozen=True)
class AllReduceInTurns(_InTurns, GradientAllReduce):
    """``GradientAllReduce`` in turns."""


@dataclass(frozen=True)
class AveragingInTurns(_InTurns, ParameterAveraging):
    """``ParameterAveraging`` in turns."""


def ours(strategy: Strategy[Any], folder: Path, network: str, epochs: int, device: str) -> None:
    """Trains ``epochs`` epochs on two workers."""
    job = digits.job(strategy, model=digits.BUILDERS[network], epochs=epochs, deadline_s=PATIENCE_S)
    rows = [digits.read_rows(digits.shard_path(folder, rank)) for rank in range(digits.WORKERS)]
    shards = [
        batches_of(ROWS_A_RECORD_BATCH, features=features.numpy(), label=labels.numpy())
        for features, labels in rows
    ]
    devices = [device if device == "cpu" else f"{device}:{rank}" for rank in range(digits.WORKERS)]
    run_world(job, shards, ranks_as="processes", devices=devices)


def peer(side: str, ranks: int, threads: int, exchange: str, *given: Any) -> None:
    """Trains as many epochs under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    script = harness.FOLDER / "peers" / "ddp.py"
    harness.run_to_end(
        [sys.executable, *launcher, script, *map(str, (side, threads, exchange, *given))],
        environment=harness.child_environment() | {"OMP_NUM_THREADS": "1"},
    )


if __name__ == "__main__":
    main()
