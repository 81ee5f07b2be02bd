"""Rounds of replicas on a GPU, against the same rounds of replicas on the CPU, and the bare copies.

A round of a replica on a GPU also copies its state to the CPU's memory and the center back. A rank
trains on next to nothing, so that a step costs a round; two ranks, processes that share the GPU in
turns, are in the detail, as is what copying as many bytes costs by itself, from pageable and from
pinned memory. Needs only torch, pyarrow and cloudpickle, no Spark and no Java. The last line is
JSON.

    python benchmarks/gpu/averaging_round.py
    python benchmarks/gpu/averaging_round.py --toy     # small and on the CPU: does it run?
"""

import argparse
import json
import statistics
import time
from functools import partial
from itertools import pairwise, product

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from sparkdl.events import WindowReport
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world
from sparkdl.worker import Job

TARGET = 1.25
SIZES = (25_000_000, 1_000_000, 10_000)
TOY_SIZES = (10_000, 100)
ROUNDS = 16
CHUNK_BYTES = 4 << 20


class OfSize(nn.Module):
    """So many parameters, of which a step needs one."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(numel))

    def forward(self, features: Tensor) -> Tensor:
        """(n,) -> (n,)."""
        return features * self.values[0]


def main() -> None:
    """Measures and reports."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--toy", action="store_true", help="small and on the CPU: no result")
    options.add_argument("--repeats", type=int, default=3, help="runs of each size and device")
    chosen = options.parse_args()
    toy = chosen.toy
    if not toy and not torch.cuda.is_available():
        options.error("torch sees no GPU here; --toy runs without one")
    devices = ("cpu",) if toy else ("cpu", "cuda:0")
    sizes = TOY_SIZES if toy else SIZES
    medians: dict[str, dict[str, float]] = {}
    for numel, ranks in product(sizes, (1, 2)):
        found: dict[str, list[float]] = {device: [] for device in devices}
        for _ in range(chosen.repeats):
            for device in devices:
                found[device] += rounds(numel, device, ranks)
        name = f"{numel:,} parameters, {ranks} ranks"
        medians[name] = {d: 1e3 * statistics.median(each) for d, each in found.items()}
        print(f"{name}: {_shown(medians[name])}", flush=True)
    largest = medians[f"{sizes[0]:,} parameters, 1 ranks"]
    copying = {} if toy else copies(SIZES[0] * 4)
    print(f"copying {4 * SIZES[0]:,} bytes: {_shown(copying)}", flush=True)
    report = {
        "benchmark": "gpu_averaging_round",
        "ratio": round(largest[devices[-1]] / largest["cpu"], 4),
        "target": TARGET,
        "detail": {
            "toy": toy,
            "milliseconds_a_round": medians,
            "milliseconds_to_copy": copying,
            "device": "cpu" if toy else torch.cuda.get_device_name(),
            "torch": torch.__version__,
        },
    }
    print(json.dumps(report), flush=True)


def rounds(numel: int, device: str, ranks: int) -> list[float]:
    """Seconds of each round, as the driver sees its windows committed."""
    rows = pa.table({"x": np.zeros(ROUNDS, np.float32), "y": np.zeros(ROUNDS, np.float32)})
    job = Job(
        model=partial(OfSize, numel),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.0),
        strategy=ParameterAveraging(1),
        schema=FeedSchema((ColumnSpec("x", torch.float32),), ColumnSpec("y", torch.float32)),
        epochs=1,
        batch_size=1,
        seed=7,
        deadline_s=120.0,
    )
    came: list[float] = []

    def note(event: object) -> None:
        if isinstance(event, WindowReport) and event.rank == 0:
            came.append(time.perf_counter())

    shards = [rows.to_batches()] * ranks
    run_world(job, shards, ranks_as="processes", devices=[device] * ranks, on_event=note)
    return [after - before for before, after in pairwise(came[1:-1])]


def copies(octets: int) -> dict[str, float]:
    """Milliseconds to copy so many bytes in chunks, by direction and kind of memory."""
    on_gpu = torch.zeros(CHUNK_BYTES, dtype=torch.uint8, device="cuda:0")
    found = {}
    for kind in ("pageable", "pinned"):
        on_cpu = torch.ones(CHUNK_BYTES, dtype=torch.uint8, pin_memory=kind == "pinned")
        for direction, (into, source) in {
            "to the CPU": (on_cpu, on_gpu),
            "to the GPU": (on_gpu, on_cpu),
        }.items():
            seconds = []
            for _ in range(5):
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(octets // CHUNK_BYTES):
                    into.copy_(source)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            found[f"{kind}, {direction}"] = 1e3 * statistics.median(seconds)
    return found


def _shown(milliseconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} ms" for name, value in milliseconds.items())


if __name__ == "__main__":
    main()
