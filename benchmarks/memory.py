"""What memory it takes: ``rounds``, ``sharded`` and ``averaging``; ``connect`` if it is named.

``averaging``: the driver's peak memory over its baseline while it averages, with 2, 4 and 8
workers. The averager runs in this process; the workers, which are not counted, run in their own.
The baseline is taken just before the averager is made, the peak (VmHWM) after the last round.

``connect``: a client of Spark Connect fits 100 M parameters, in a process of its own: its peak, and
that of the process beside rank 0 which averages, over those of a small fit. The server is a JVM of
its own, and so are its executors; none of them is counted.

``sharded``: the peak of a rank that trains 100 M parameters with Adam, sharded against
DistributedDataParallel. Four ranks over gloo, each a process. The peer is a loop of plain torch;
beside it is our own all-reduce without shards. The peak is taken from before the model is built to
the end of two epochs with a commit within each, over what the process with its imports had before.

``rounds``: does resident memory of driver and workers stay flat over a thousand rounds? Four
workers, each a process, train the network of the other benchmarks (0.94 MB of parameters) with a
round after every minibatch and a checkpoint after every epoch of twenty. A list that grew by a
kilobyte per round would show as a megabyte.
"""

import argparse
import contextlib
import ctypes
import gc
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import digits
import fit_session
import harness
import numpy as np
import recovery
import round_processes
import torch
import torch.distributed as dist
from harness import status_bytes
from torch import nn
from torch.multiprocessing.spawn import start_processes

from sparkdl import GradientAllReduce
from sparkdl.callbacks import WorkerCallback, WorkerStep
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.events import WindowReport
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import batches_of, run_world

PARAMETERS = 25_000_000
PARAMETER_BYTES = 4 * PARAMETERS
WORLD_SIZES = (2, 4, 8)
GROWTH = 0.25
"""How much the peak may grow from the fewest to the most workers, as a fraction of P."""
WIDTH, LAYERS = 1448, 48
"""Of a client's and of the sharded model, square layers of 8.4 MB: 100.6 M parameters."""
SAMPLE_SECONDS = 0.1
FORK_SERVER = "sparkdl.spark.launch.fork_server"
CLIENT_CONF = {"spark.driver.memory": "3g", "spark.executor.memory": "3072m"}
RANKS = 4
ROWS, BATCH, EPOCHS = 16, 8, 2
SHARDED_TARGET = 0.35
PEER, OURS, SHARDED = "torch's DDP", "GradientAllReduce", "GradientAllReduce, sharded"
FLAT = 1.02
"""The growth over the rounds allowed for what the allocator may keep."""


def main() -> None:
    """Measures what is asked for, and reports."""
    parts: dict[str, tuple[harness.Part, int, int]] = {
        # The first ones see least of what others have left in this process.
        "rounds": (rounds, 1, 1),
        "sharded": (sharded, 3, 1),
        "averaging": (averaging, 5, 2),
        "connect": (connect, 1, 1),
    }
    usual = [*parts][:3]
    harness.measure_parts(
        "memory", harness.parser(__doc__), parts, default=usual, child=fits_of_a_client
    )


def averaging(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures the driver's peak."""
    print(f"P = {PARAMETER_BYTES / 1e6:.0f} MB of parameters; {chosen.repeats} rounds each")
    peak_bytes(2, rounds=1, numel=1_000_000)  # the libraries' first use belongs to the baseline
    peaks = {}
    for workers in WORLD_SIZES:
        peaks[workers] = peak_bytes(workers, rounds=chosen.repeats, numel=PARAMETERS)
        print(
            f"{workers} workers: peak {peaks[workers] / 1e6:.1f} MB over the baseline",
            flush=True,
        )
    growth = peaks[WORLD_SIZES[-1]] - peaks[WORLD_SIZES[0]]
    claims = [
        harness.claim("highest peak / P", max(peaks.values()), PARAMETER_BYTES, target=3.0),
        harness.claim(
            "(peak with 8 - peak with 2 workers) / P", growth, PARAMETER_BYTES, target=GROWTH
        ),
    ]
    return claims, {"parameter_bytes": PARAMETER_BYTES, "peak_bytes_over_baseline": peaks}


def peak_bytes(workers: int, *, rounds: int, numel: int) -> int:
    """Returns this process's peak resident memory over its baseline while it averages, in bytes.

    Args:
        workers: number of worker processes.
        rounds: rounds to run.
        numel: number of float32 parameters.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory left by an earlier turn must not be reused unseen
    peak = Peak()
    with round_processes.rounds(workers, numel) as processes:
        for _ in range(rounds):
            processes.round()
        return peak.bytes_over_baseline()


class Peak:
    """The peak resident memory of this process, from now on, over what it has now."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = status_bytes("VmRSS")

    def bytes_over_baseline(self) -> int:
        """Returns the peak up to now."""
        return status_bytes("VmHWM") - self._before


def connect(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures a client's fit and the process that averages for it."""
    layers = 6 if chosen.quick else LAYERS
    parameter_bytes = 4 * layers * WIDTH * (WIDTH + 1)
    peaks = harness.call_child(__file__, layers)
    claims = [
        harness.claim(f"peak of {name} / P", peaks[key], parameter_bytes, target=3.0)
        for name, key in (("the client", "client"), ("what serves beside rank 0", "serving"))
    ]
    return claims, {"parameter_bytes": parameter_bytes, "peak_bytes_over_a_small_fit": peaks}


def fits_of_a_client(layers: int) -> dict[str, int]:
    """Fits, small and large; returns the bytes by which the large fit raised the peak memory.

    Of this client, and of the process beside rank 0 that serves it.
    """
    torch.set_num_threads(1)
    spark = harness.session("local-cluster[2,1,3072]", CLIENT_CONF, connect=True)
    features = f"transform(sequence(1, {WIDTH}), x -> float(sin(id * x))) as features"
    rows = spark.range(0, 32, 1, 2).selectExpr(features, "float(id) as label")
    peaks = []
    for many in (1, layers):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        with peak_of_serving() as serving:
            fit_session.estimator(
                model=partial(network, many),
                loss=nn.MSELoss(),
                optimizer=partial(torch.optim.SGD, lr=1e-4),
                batchSize=8,
            ).fit(rows)
        peaks.append({"client": status_bytes("VmHWM"), "serving": max(serving)})
    spark.stop()
    small, large = peaks
    return {name: large[name] - small[name] for name in large}


def network(layers: int) -> nn.Module:
    """Returns layers of ``WIDTH``, and one output."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), nn.Linear(WIDTH, 1))


@contextmanager
def peak_of_serving() -> Iterator[list[int]]:
    """The peak memory of the process that serves, in bytes, as seen now and then.

    Spark's Python process that has a fork server serves; what the fork server forks, rank 0, has
    its command line.
    """
    seen: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            found = harness.processes()
            forking = [each for each in found.values() if FORK_SERVER in each.command]
            for parent in {each.parent for each in forking}:
                if FORK_SERVER not in found[parent].command:
                    with contextlib.suppress(OSError, RuntimeError):  # it has ended meanwhile
                        seen.append(status_bytes("VmHWM", parent))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield seen
    ended.set()
    thread.join()


def sharded(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures a rank's peak."""
    layers = 12 if chosen.quick else LAYERS
    strategies = {
        OURS: GradientAllReduce(commit_every=1),
        SHARDED: GradientAllReduce(commit_every=1, shard_parameters=True),
    }
    turns = {PEER: partial(peer, layers)} | {
        name: partial(ours, layers, strategy) for name, strategy in strategies.items()
    }
    measured = harness.interleave(turns, repeats=chosen.repeats)
    peaks = harness.show_each(measured, unit="MB", digits=0)
    claims = [
        harness.claim(
            f"peak of a rank, sharded / {other}",
            peaks[SHARDED],
            peaks[other],
            target=SHARDED_TARGET,
        )
        for other in (PEER, OURS)
    ]
    return claims, {"parameters": layers * WIDTH * (WIDTH + 1), "peak_mb_over_baseline": peaks}


def build(layers: int) -> nn.Module:
    """The model, with a head for two classes that is as wide as the layers."""
    torch.manual_seed(3)
    return nn.Sequential(
        *(
            each
            for _ in range(layers)
            for each in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False))
        )
    )


peak: Peak
"""Of this process, if it is a rank."""


def build_measured(layers: int) -> nn.Module:
    """The same in a process whose memory is measured from here on."""
    global peak
    peak = Peak()
    return build(layers)


def write_peak(folder: Path) -> None:
    """Writes the peak of this process to a file of its own, in MB."""
    (folder / str(os.getpid())).write_text(str(peak.bytes_over_baseline() / 1e6))


def largest(folder: Path) -> float:
    """Returns the largest peak of a rank, in MB."""
    return max(float(each.read_text()) for each in folder.iterdir())


class Watch(WorkerCallback):
    """Writes the peak after each step: of the second epoch's, it has a commit's and an end's.

    Args:
        folder: for the ranks' files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def after_step(self, step: WorkerStep) -> None:
        """Write it."""
        write_peak(self._folder)


def rows_of(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's features and labels."""
    random = np.random.default_rng(rank)
    features = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return features, random.integers(0, 2, ROWS)


def ours(layers: int, strategy: GradientAllReduce) -> float:
    """Returns the largest peak of a rank, in MB."""
    shards = [
        batches_of(ROWS, features=features, label=labels)
        for features, labels in map(rows_of, range(RANKS))
    ]
    with tempfile.TemporaryDirectory() as name:
        job = digits.job(
            strategy,
            width=WIDTH,
            model=partial(build_measured, layers),
            optimizer=partial(torch.optim.Adam, lr=1e-4),
            epochs=EPOCHS,
            batch_size=BATCH,
            deadline_s=600.0,
            callbacks=(Watch(Path(name)),),
        )
        run_world(job, shards, ranks_as="processes")
        return largest(Path(name))


def peer(layers: int) -> float:
    """Returns the same of plain torch."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as meeting:
        given = layers, Path(name), f"file://{meeting}/ranks"
        start_processes(  # type: ignore[no-untyped-call]
            peer_rank, given, nprocs=RANKS, start_method="forkserver"
        )
        return largest(Path(name))


def peer_rank(rank: int, layers: int, folder: Path, meeting: str) -> None:
    """Trains one rank."""
    torch.set_num_threads(1)
    bare = build_measured(layers)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    model = nn.parallel.DistributedDataParallel(bare, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    features, labels = map(torch.from_numpy, rows_of(rank))
    for _ in range(EPOCHS):
        for start in range(0, ROWS, BATCH):
            batch = slice(start, start + BATCH)
            digits.train_step(model, optimizer, features[batch], labels[batch])
    write_peak(folder)
    dist.destroy_process_group()


def rounds(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures resident memory early and late."""
    count = 200 if chosen.quick else 1000
    looks = 100, count - 5
    resident = resident_after(count, looks)
    for number, (driver, worker) in resident.items():
        print(f"round {number}: driver {driver:.1f} MB, largest worker {worker:.1f} MB")
    early, late = (resident[each] for each in looks)
    claims = [
        harness.claim(f"{who}'s memory, round {looks[1]} / {looks[0]}", b, a, target=FLAT)
        for who, a, b in zip(("driver", "a worker"), early, late, strict=True)
    ]
    return claims, {"resident_mb_of_driver_and_largest_worker": resident}


def resident_after(count: int, looks: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """Returns the resident megabytes of the driver and of its largest worker, by round.

    Args:
        count: how many rounds to run.
        looks: the rounds after which to measure.
    """
    resident: dict[int, tuple[float, float]] = {}
    committed = 0

    def look(event: object) -> None:
        nonlocal committed
        if isinstance(event, WindowReport) and event.rank == 0:
            committed += 1
            if committed in looks:
                workers = [
                    status_bytes("VmRSS", each.pid) for each in multiprocessing.active_children()
                ]
                resident[committed] = status_bytes("VmRSS") / 1e6, max(workers) / 1e6

    with tempfile.TemporaryDirectory() as folder:
        run_world(
            recovery.job(count // 20, ParameterAveraging(1), batch_size=2),
            recovery.shards(40 * recovery.WORKERS),
            ranks_as="processes",
            checkpoints=CheckpointPolicy(path=folder),
            on_event=look,
        )
    return resident


if __name__ == "__main__":
    main()
