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
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import recovery
import round_processes
import torch
import torch.distributed as dist
from harness import status_bytes
from torch import nn

from sparkdl import GradientAllReduce, TorchEstimator
from sparkdl.callbacks import WorkerCallback, WorkerStep
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.events import WindowReport
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

PARAMETERS = 25_000_000
PARAMETER_BYTES = 4 * PARAMETERS
WORLD_SIZES = (2, 4, 8)
GROWTH = 0.25
"""How much the peak may grow from the fewest to the most workers, as a fraction of P."""
WIDTH, LAYERS = 1448, 48
"""Of a client's and of the sharded model, square layers of 8.4 MB: 100.6 M parameters."""
SAMPLE_SECONDS = 0.1
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
    options = harness.parser(__doc__)
    options.add_argument("--rounds", type=int, default=1000, help="of the part ``rounds``")
    harness.measure_parts("memory", options, parts, default=[*parts][:3], child=fits_of_a_client)


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
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    baseline = status_bytes("VmRSS")
    with round_processes.rounds(workers, numel) as processes:
        for _ in range(rounds):
            processes.round()
        return status_bytes("VmHWM") - baseline


def connect(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures a client's fit and the process that averages for it."""
    layers = 6 if chosen.quick else LAYERS
    parameter_bytes = 4 * layers * WIDTH * (WIDTH + 1)
    peaks = harness.call_child(__file__, layers)
    print(f"P = {parameter_bytes / 1e6:.0f} MB: {peaks}")
    claims = [
        harness.claim(f"peak of {name} / P", peaks[key], parameter_bytes, target=3.0)
        for name, key in (("the client", "client"), ("what serves beside rank 0", "serving"))
    ]
    return claims, {"parameter_bytes": parameter_bytes, "peak_bytes_over_a_small_fit": peaks}


def fits_of_a_client(layers: int) -> dict[str, int]:
    """Fits, small and large; returns the bytes by which the large fit raised the peak memory.

    Of this client, of the process beside rank 0 that serves it, and of rank 0's own.
    """
    from fit_session import CONF, connect_session

    torch.set_num_threads(1)
    spark = connect_session("local-cluster[2,1,3072]", CONF | CLIENT_CONF)
    features = f"transform(sequence(1, {WIDTH}), x -> float(sin(id * x))) as features"
    rows = spark.range(0, 32, 1, 2).selectExpr(features, "float(id) as label")
    peaks = []
    for many in (1, layers):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        with peaks_below() as seen:
            TorchEstimator(
                model=partial(network, many),
                loss=nn.MSELoss(),
                optimizer=partial(torch.optim.SGD, lr=1e-4),
                batchSize=8,
                numWorkers=2,
                progress=False,
            ).fit(rows)
        peaks.append({**seen, "client": status_bytes("VmHWM")})
    spark.stop()
    small, large = peaks
    return {name: large[name] - small[name] for name in large}


def network(layers: int) -> nn.Module:
    """Returns layers of ``WIDTH``, and one output."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), nn.Linear(WIDTH, 1))


@contextmanager
def peaks_below() -> Iterator[dict[str, int]]:
    """The peak memory of the processes that serve and that are rank 0, in bytes, once it is over.

    Spark's Python processes that have a child serve; the child forks rank 0.
    """
    seen: dict[str, int] = {"serving": 0, "rank": 0}
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
                with contextlib.suppress(OSError, RuntimeError, IndexError):
                    for name, of in _roles(process).items():
                        seen[name] = max(seen[name], of)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield seen
    ended.set()
    thread.join()


def _roles(process: int) -> dict[str, int]:
    """What a fork server's parent and child have had at most; nothing for another process."""
    if "sparkdl.spark.launch.fork_server" not in _text(process, "cmdline"):
        return {}
    parent = int(_text(process, "status").partition("PPid:")[2].split()[0])
    if "sparkdl.spark.launch.fork_server" in _text(parent, "cmdline"):
        return {"rank": status_bytes("VmHWM", process)}
    return {"serving": status_bytes("VmHWM", parent)}


def _text(process: int, name: str) -> str:
    return Path(f"/proc/{process}/{name}").read_text()


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
    peaks = {
        name: harness.show(name, [each / 1e6 for each in found], unit="MB", digits=0)
        for name, found in measured.items()
    }
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


class Peak:
    """Writes the peak memory of this process over what it has now to a file of its own.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = status_bytes("VmRSS")
        self._path = folder / str(os.getpid())

    def write(self) -> None:
        """Write the peak up to now."""
        self._path.write_text(str(status_bytes("VmHWM") - self._before))


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


def build_measured(layers: int, folder: Path) -> nn.Module:
    """The same on a worker, whose memory is measured from here on."""
    global peak
    peak = Peak(folder)
    return build(layers)


class Watch(WorkerCallback):
    """Writes the peak after each step: of the second epoch's, it has a commit's and an end's."""

    def after_step(self, step: WorkerStep) -> None:
        """Write it."""
        peak.write()


def rows_of(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's features and labels."""
    random = np.random.default_rng(rank)
    features = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return features, random.integers(0, 2, ROWS)


def ours(layers: int, strategy: GradientAllReduce) -> float:
    """Returns the largest peak of a rank, in bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        driver = os.getpid()

        def model() -> nn.Module:
            return build(layers) if os.getpid() == driver else build_measured(layers, folder)

        job = Job(
            model=model,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-4),
            strategy=strategy,
            schema=FeedSchema(
                (ColumnSpec("features", torch.float32, (WIDTH,)),),
                ColumnSpec("label", torch.int64),
            ),
            epochs=EPOCHS,
            batch_size=BATCH,
            seed=7,
            deadline_s=600,
            callbacks=(Watch(),),
        )
        shards = [
            batches_of(ROWS, features=features, label=labels)
            for features, labels in map(rows_of, range(RANKS))
        ]
        run_world(job, shards, ranks_as="processes")
        return max(float(each.read_text()) for each in folder.iterdir())


def peer(layers: int) -> float:
    """Returns the same of plain torch."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        context = multiprocessing.get_context("forkserver")
        ranks = [
            context.Process(target=peer_rank, args=(layers, rank, port, Path(name)))
            for rank in range(RANKS)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        return max(float(each.read_text()) for each in Path(name).iterdir())


def peer_rank(layers: int, rank: int, port: int, folder: Path) -> None:
    """Trains one rank."""
    torch.set_num_threads(1)
    peak = Peak(folder)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    model = nn.parallel.DistributedDataParallel(build(layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    features, labels = map(torch.from_numpy, rows_of(rank))
    for _ in range(EPOCHS):
        for start in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            outputs = model(features[start : start + BATCH])
            nn.functional.cross_entropy(outputs, labels[start : start + BATCH]).backward()
            optimizer.step()
    peak.write()
    dist.destroy_process_group()


def rounds(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures resident memory early and late."""
    rounds = 200 if chosen.quick else chosen.rounds
    looks = (100, rounds // 2, rounds - 5)
    resident = resident_after(rounds, looks)
    for number, (driver, *workers) in resident.items():
        shown = ", ".join(f"{mb:.1f}" for mb in workers)
        print(f"round {number}: driver {driver:.1f} MB, largest worker {shown} MB")
    early, late = resident[looks[0]], resident[looks[-1]]
    claims = [
        harness.claim(f"{who}'s memory, round {looks[-1]} / {looks[0]}", b, a, target=FLAT)
        for who, a, b in zip(("driver", "a worker"), early, late, strict=True)
    ]
    return claims, {"resident_mb_of_driver_and_largest_worker": resident}


def resident_after(rounds: int, looks: tuple[int, ...]) -> dict[int, list[float]]:
    """Returns the resident megabytes of the driver and of its largest worker, by round.

    Args:
        rounds: how many to run.
        looks: the rounds after which to measure.
    """
    resident: dict[int, list[float]] = {}
    committed = 0

    def look(event: object) -> None:
        nonlocal committed
        if isinstance(event, WindowReport) and event.rank == 0:
            committed += 1
            if committed in looks:
                resident[committed] = recovery.resident_mb()

    with tempfile.TemporaryDirectory() as folder:
        run_world(
            recovery.job(rounds // 20, ParameterAveraging(1), rows_a_batch=2),
            recovery.shards(40 * recovery.WORKERS),
            ranks_as="processes",
            checkpoints=CheckpointPolicy(path=folder),
            on_event=look,
        )
    return resident


if __name__ == "__main__":
    main()
