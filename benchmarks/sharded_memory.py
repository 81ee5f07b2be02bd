"""Peak memory of a rank that trains 100 M parameters with Adam: sharded / DistributedDataParallel.

Four ranks over gloo, each a process. The peer is a loop of plain torch; beside it is our own
all-reduce without shards. The peak (VmHWM) is taken from before the model is built to the end of
two epochs with a commit within each, over what the process with its imports had before.
"""

import multiprocessing
import os
import socket
import tempfile
from functools import partial
from pathlib import Path

import harness
import numpy as np
import torch
import torch.distributed as dist
from averaging_memory import status_bytes
from torch import nn

from sparkdl import GradientAllReduce
from sparkdl.callbacks import WorkerCallback, WorkerStep
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

RANKS = 4
WIDTH = 1448
"""Of square layers with as many parameters as 8.4 MB hold."""
LAYERS = 48
"""Of that width: 100.6 M parameters."""
ROWS, BATCH, EPOCHS = 16, 8, 2
TARGET = 0.35
PEER, OURS, SHARDED = "torch's DDP", "GradientAllReduce", "GradientAllReduce, sharded"


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=3)
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
        harness.Claim(
            name=f"peak of a rank, sharded / {other}",
            ratio=peaks[SHARDED] / peaks[other],
            target=TARGET,
        )
        for other in (PEER, OURS)
    ]
    detail = {"parameters": layers * WIDTH * (WIDTH + 1), "peak_mb_over_baseline": peaks}
    harness.report("sharded_memory", claims, detail)


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


def rows(rank: int) -> tuple[np.ndarray, np.ndarray]:
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
            for features, labels in map(rows, range(RANKS))
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
    features, labels = map(torch.from_numpy, rows(rank))
    for _ in range(EPOCHS):
        for start in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            outputs = model(features[start : start + BATCH])
            nn.functional.cross_entropy(outputs, labels[start : start + BATCH]).backward()
            optimizer.step()
    peak.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
