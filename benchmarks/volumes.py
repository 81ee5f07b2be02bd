"""Predictions for a volume by a small 3-D U-Net, against a bare loop in two processes.

The volume has 640 x 160 x 160 voxels (uint8, Zarr), patches 16 x 64 x 64 that overlap by 4 x 16 x
16; two executors of one core. The bare loop is two processes, each of which reads its half with the
patches' margin, takes it patch by patch through the same network, blends in one float32 buffer and
writes it with tensorstore. Sessions and processes are warm: each has predicted a small volume
before. The second claim is the same call with a network that kills its process in a fifth of the
tasks, once each, at random points.
"""

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import tensorstore
import torch
from networks import Deadly, UNet
from torch import nn

WORKERS = 2
MASTER = f"local-cluster[{WORKERS},1,1024]"
CONF = {
    "spark.executor.memory": "1024m",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
}
PATCH, OVERLAP = (16, 64, 64), (4, 16, 16)
SHAPE, SMALL = (640, 160, 160), (32, 64, 64)
AT_ONCE = 4
"""Patches that the bare loop gives the network, as many as ours: one by one takes it longer."""
DEADLINE_S = 3000.0
KILLED = 0.2
OURS, DYING, BARE = "sparkdl", "sparkdl, a fifth of the tasks killed", "bare loop"


def main() -> None:
    """Measures and reports, or is one of the measurements."""
    options = harness.parser(__doc__)
    chosen = harness.parse(options, repeats=3, child=lambda way, folder: WAYS[way](Path(folder)))
    claims: list[harness.Claim] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        if "speed" in (chosen.case or ["speed"]):
            shape = (SHAPE[0] // 4, *SHAPE[1:]) if chosen.quick else SHAPE
            write(folder / "small", SMALL, "uint8")
            write(folder / "volume", shape, "uint8")
            turns = {way: partial(in_a_process, way, folder) for way in (OURS, DYING, BARE)}
            runs = harness.interleave(turns, repeats=chosen.repeats)
            seconds = {way: [run["seconds"] for run in each] for way, each in runs.items()}
            middle = {way: harness.show(way, each) for way, each in seconds.items()}
            claims += [
                harness.Claim(
                    name="voxels/s / bare loop in two processes",
                    ratio=middle[BARE] / middle[OURS],
                    target=0.9,
                    at_least=True,
                    ours=middle[OURS],
                    peer=middle[BARE],
                ),
                harness.claim(
                    "time with a fifth of the tasks killed / without",
                    middle[DYING],
                    middle[OURS],
                    target=1.25,
                ),
            ]
            found |= {"shape": shape, "runs": runs}
    harness.report("volumes", claims, found)


def write(path: Path, shape: tuple[int, ...], dtype: str) -> None:
    """Writes a volume of random numbers, which repeat along the first axis."""
    spec = {"driver": "zarr", "kvstore": f"file://{path}"}
    layout = tensorstore.ChunkLayout(chunk_shape=[min(n, 64) for n in shape])
    store = tensorstore.open(
        spec, create=True, dtype=dtype, shape=shape, chunk_layout=layout
    ).result()
    part = np.random.default_rng(3).integers(1, 255, (64, *shape[1:])).astype(dtype)
    for start in range(0, shape[0], 64):
        rows = min(64, shape[0] - start)
        store[start : start + rows].write(part[:rows]).result()


def in_a_process(way: str, folder: Path) -> dict[str, Any]:
    """Returns what a measurement in a fresh session found."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        for name in folder.iterdir():
            if name.is_dir() and name.name in ("small", "volume", "large"):
                (Path(own) / name.name).symlink_to(name)
        child = harness.call_child(
            __file__,
            way,
            own,
            environment=harness.child_environment() | {"OMP_NUM_THREADS": "1"},
            timeout=DEADLINE_S,
        )
    print(f"  {way}: {child}", flush=True)
    return child


def transformed(folder: Path, network: nn.Module) -> dict[str, Any]:
    """Predicts with ``TorchModel.transform_volume``, in a warm session."""
    from sparkdl import TorchModel, create_session

    spark = create_session("volumes", master=MASTER, conf=CONF)
    spark.range(2).repartition(2).count()  # waits for the executors
    example = torch.zeros(1, 1, *PATCH)
    sizes = {"patch": PATCH, "overlap": OVERLAP, "progress": False}
    warm = TorchModel.from_module(UNet(), example)
    warm.transform_volume(folder / "small", folder / "small.out", **sizes)
    model = TorchModel.from_module(network, example)
    before, began = harness.processor_spent(), time.perf_counter()
    done = model.transform_volume(folder / "volume", folder / "volume.out", **sizes)
    seconds, processor = time.perf_counter() - began, harness.processor_since(before)
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "chunks": done.chunks,
        "patches": done.patches,
    }


def dying(folder: Path) -> dict[str, Any]:
    """The same with a network that kills its process."""
    tokens = folder / "tokens"
    tokens.mkdir()
    result = transformed(folder, Deadly(str(tokens), KILLED))
    return result | {"killed": len(list(tokens.glob("killed-*")))}


def bare(folder: Path) -> dict[str, Any]:
    """Predicts with two processes, each of which has half of the volume."""
    context = multiprocessing.get_context("spawn")  # tensorstore refuses to be forked
    ready, go = context.Barrier(WORKERS + 1), context.Barrier(WORKERS + 1)
    spent = context.Queue()
    store = opened(folder / "volume")
    depth = store.shape[0]
    spec = {"driver": "zarr", "kvstore": f"file://{folder}/volume.out"}
    workers = [
        context.Process(
            target=loop, args=(folder, depth * n // 2, depth * (n + 1) // 2, ready, go, spent)
        )
        for n in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    ready.wait(300)
    began = time.perf_counter()
    layout = tensorstore.ChunkLayout(chunk_shape=[1, 16, 48, 48])
    tensorstore.open(
        spec, create=True, dtype="float32", shape=[2, *store.shape], chunk_layout=layout
    ).result()
    go.wait(300)
    for worker in workers:
        worker.join(600)
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("a process of the bare loop failed")
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "processor_seconds": [spent.get() for _ in workers]}


def opened(path: Path) -> Any:
    """Returns an array as it is there."""
    return tensorstore.open({"driver": "zarr", "kvstore": f"file://{path}"}).result()


def loop(folder: Path, lower: int, upper: int, ready: Any, go: Any, spent: Any) -> None:
    """What anybody would write: one half of the volume, from lower to upper."""
    torch.set_num_threads(1)
    network = UNet().eval()
    with torch.no_grad():
        network(torch.zeros(1, 1, *PATCH))
    ready.wait(300)
    go.wait(300)
    began = time.process_time()
    source, target = opened(folder / "volume"), opened(folder / "volume.out")
    starts = []
    for size, patch, overlap in zip(source.shape, PATCH, OVERLAP, strict=True):
        last = size - patch
        starts.append([*range(0, last, patch - overlap), last])
    starts[0] = [start for start in starts[0] if start < upper and start + PATCH[0] > lower]
    origin = starts[0][0]
    volume = source[origin : starts[0][-1] + PATCH[0]].read().result()
    along = [np.arange(1, n + 1) * 2 / (n + 1) - 1 for n in PATCH]
    grid = np.meshgrid(*along, indexing="ij")
    mask = torch.from_numpy(np.exp(-sum(1 / (1 - u**2) for u in grid))).float()
    sums, masks = torch.zeros(2, *volume.shape), torch.zeros(volume.shape)
    places = [
        tuple(slice(a, a + n) for a, n in zip((z - origin, y, x), PATCH, strict=True))
        for z, y, x in itertools.product(*starts)
    ]
    with torch.no_grad():
        for first in range(0, len(places), AT_ONCE):
            some = places[first : first + AT_ONCE]
            given = torch.from_numpy(np.stack([volume[each] for each in some]).astype(np.float32))
            for place, outputs in zip(some, network(given[:, None]), strict=True):
                sums[(slice(None), *place)].addcmul_(outputs, mask)
                masks[place] += mask
    output = (sums / masks)[:, lower - origin : upper - origin]
    target[:, lower:upper].write(output.numpy()).result()
    spent.put(time.process_time() - began)


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    OURS: lambda folder: transformed(folder, UNet()),
    DYING: dying,
    BARE: bare,
}

if __name__ == "__main__":
    main()
