"""Predictions for a volume by a small 3-D U-Net, against a bare loop in two processes.

The volume has 640 x 160 x 160 voxels (uint8, Zarr), patches 16 x 64 x 64 that overlap by 4 x 16 x
16; two executors of one core. The bare loop is two processes, each of which reads its half with the
patches' margin, takes it patch by patch through the same network, blends in one float32 buffer and
writes it with tensorstore. Sessions and processes are warm: each has predicted a small volume
before. The second claim is the same call with a network that kills its process once, in one of the
six tasks.
"""

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import tensorstore
import torch
from networks import Deadly, UNet
from round_processes import RoundProcesses
from torch import nn

WORKERS = 2
MASTER = f"local-cluster[{WORKERS},1,1024]"
CONF = harness.CONF | {"spark.executor.memory": "1024m"}
PATCH, OVERLAP = (16, 64, 64), (4, 16, 16)
SHAPE, SMALL = (640, 160, 160), (32, 64, 64)
AT_ONCE = 4
"""Patches that the bare loop gives the network, as many as ours: one by one takes it longer."""
DEADLINE_S = 3000.0
OURS, DYING, BARE = "sparkdl", "sparkdl, one of the tasks killed", "bare loop"


def main() -> None:
    """Measures and reports, or is one of the measurements."""
    options = harness.parser(__doc__)
    chosen = harness.parse(options, repeats=3, child=lambda way, folder: WAYS[way](Path(folder)))
    environment = harness.child_environment() | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        shape = (SHAPE[0] // 4, *SHAPE[1:]) if chosen.quick else SHAPE
        write(Path(folder) / "small", SMALL)
        write(Path(folder) / "volume", shape)
        child = partial(harness.call_child, environment=environment, timeout=DEADLINE_S)
        turns = {way: partial(child, __file__, way, folder) for way in WAYS}
        runs = harness.interleave(turns, repeats=chosen.repeats)
    middle = harness.show_each({way: [run["seconds"] for run in runs[way]] for way in runs})
    claims = [
        harness.faster(
            "voxels/s / bare loop in two processes", middle[OURS], middle[BARE], target=0.9
        ),
        harness.claim(
            "time with one of the tasks killed / without", middle[DYING], middle[OURS], target=1.25
        ),
    ]
    harness.report("volumes", claims, {"shape": shape, "runs": runs})


def write(path: Path, shape: tuple[int, ...]) -> None:
    """Writes a volume of random bytes, which repeat along the first axis."""
    store = created(path, shape, [min(n, 64) for n in shape], "uint8")
    part = np.random.default_rng(3).integers(1, 255, (64, *shape[1:])).astype("uint8")
    for start in range(0, shape[0], 64):
        rows = min(64, shape[0] - start)
        store[start : start + rows].write(part[:rows]).result()


def created(path: Path, shape: tuple[int, ...], chunks: list[int], dtype: str) -> Any:
    """Returns a new array."""
    spec = {"driver": "zarr", "kvstore": f"file://{path}"}
    layout = tensorstore.ChunkLayout(chunk_shape=chunks)
    return tensorstore.open(
        spec, create=True, dtype=dtype, shape=shape, chunk_layout=layout
    ).result()


def transformed(folder: Path, network_in: Callable[[Path], nn.Module]) -> dict[str, Any]:
    """Predicts with ``TorchModel.transform_volume``, in a warm session."""
    from sparkdl import TorchModel, create_session

    spark = create_session("volumes", master=MASTER, conf=CONF)
    spark.range(2).repartition(2).count()  # waits for the executors
    example = torch.zeros(1, 1, *PATCH)
    sizes: dict[str, Any] = {"patch": PATCH, "overlap": OVERLAP, "progress": False}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        own = Path(name)
        warm = TorchModel.from_module(UNet(), example)
        warm.transform_volume(folder / "small", own / "small.out", **sizes)
        model = TorchModel.from_module(network_in(own), example)
        seconds, processor = harness.timed(
            lambda: model.transform_volume(folder / "volume", own / "volume.out", **sizes)
        )
        killed = (own / "killed").exists()
    return {"seconds": seconds, "processor_seconds": processor, "killed": killed}


def bare(folder: Path) -> dict[str, Any]:
    """Predicts with two processes, each of which has half of the volume."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        # They are spawned: tensorstore refuses to be forked.
        RoundProcesses(half, WORKERS, (folder / "volume", Path(name) / "out")) as processes,
    ):
        shape = opened(folder / "volume").shape

        def predict() -> None:
            created(Path(name) / "out", (2, *shape), [1, 16, 48, 48], "float32")
            processes.round()

        seconds, processor = harness.timed(predict)
    return {"seconds": seconds, "processor_seconds": processor}


def opened(path: Path) -> Any:
    """Returns an array as it is there."""
    return tensorstore.open({"driver": "zarr", "kvstore": f"file://{path}"}).result()


def half(rank: int, volume: Path, output: Path) -> tuple[Callable[[], None], torch.Tensor]:
    """Returns what a process of the bare loop does, once it is warm."""
    network = UNet().eval()
    with torch.no_grad():
        network(torch.zeros(1, 1, *PATCH))
    return partial(loop, rank, network, volume, output), torch.empty(0)


def loop(rank: int, network: nn.Module, volume: Path, output: Path) -> None:
    """What anybody would write: one half of the volume."""
    source, target = opened(volume), opened(output)
    lower, upper = (source.shape[0] * n // WORKERS for n in (rank, rank + 1))
    starts = []
    for size, patch, overlap in zip(source.shape, PATCH, OVERLAP, strict=True):
        last = size - patch
        starts.append([*range(0, last, patch - overlap), last])
    starts[0] = [start for start in starts[0] if start < upper and start + PATCH[0] > lower]
    origin = starts[0][0]
    voxels = source[origin : starts[0][-1] + PATCH[0]].read().result()
    along = [np.arange(1, n + 1) * 2 / (n + 1) - 1 for n in PATCH]
    grid = np.meshgrid(*along, indexing="ij")
    mask = torch.from_numpy(np.exp(-sum(1 / (1 - u**2) for u in grid))).float()
    sums, masks = torch.zeros(2, *voxels.shape), torch.zeros(voxels.shape)
    places = [
        tuple(slice(a, a + n) for a, n in zip((z - origin, y, x), PATCH, strict=True))
        for z, y, x in itertools.product(*starts)
    ]
    with torch.no_grad():
        for first in range(0, len(places), AT_ONCE):
            some = places[first : first + AT_ONCE]
            given = torch.from_numpy(np.stack([voxels[each] for each in some]).astype(np.float32))
            for place, outputs in zip(some, network(given[:, None]), strict=True):
                sums[(slice(None), *place)].addcmul_(outputs, mask)
                masks[place] += mask
    blended = (sums / masks)[:, lower - origin : upper - origin]
    target[:, lower:upper].write(blended.numpy()).result()


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    OURS: lambda folder: transformed(folder, lambda own: UNet()),
    DYING: lambda folder: transformed(folder, Deadly),
    BARE: bare,
}

if __name__ == "__main__":
    main()
