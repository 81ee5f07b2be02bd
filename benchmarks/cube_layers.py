"""Layers computed by many ranks together: 1-D (torch's), 2-D and 3-D (``parallelize_3d``).

Pairs of layers as in a transformer, h -> 4 h -> h. With 64 ranks and 8 h rows, bytes received and
memory are counted on a fake process group, where one process plays rank 0: an all-reduce counts as
one in a ring; memory is parameters, gradients, and what autograd keeps for the backward pass. With
8 ranks and 32 h rows, each rank on a host of its own (network namespaces, 100 Mbit/s), seconds of a
forward and backward pass. 1-D is ``ColwiseParallel`` and ``RowwiseParallel``. 2-D is written here
with DTensor: gathers in the place of SUMMA's steps, which receives 2/3 of the bytes and keeps more.
``modelled`` says what the paper's 2.32x and 1.57x are in a model of 64 devices. Needs root.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

sys.path.append(str(Path(__file__).parent / "studies"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "parallel"))
from cubes import MovedBytes, playing_one_of  # type: ignore[import-not-found]
from linked_hosts import LinkedHosts, traffic_of

from sparkdl.parallel.cube import cube_mesh
from sparkdl.parallel.model import parallelize_3d

MBIT = 100.0
PAIRS = 2
SIZES = {64: (1024, 8), 8: (256, 32)}
"""h, and how many times as many rows, by ranks: with 8, what is sent is to outweigh the rest."""
Step = Callable[[], None]


class Linear2D(nn.Module):
    """A product of matrices in blocks: X is gathered along rows of the mesh, A along columns."""

    def __init__(self, inputs: int, outputs: int, mesh: DeviceMesh) -> None:
        super().__init__()
        down, across = mesh.shape
        self.mesh = mesh
        self.weight = nn.Parameter(torch.randn(inputs // down, outputs // across) / inputs**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._gather(inputs, "across", 1) @ self._gather(self.weight, "down", 0)

    def _gather(self, part: Tensor, along: str, dim: int) -> Tensor:
        parts = DTensor.from_local(part, self.mesh[along], [Shard(dim)])
        whole = parts.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])


def plain(h: int) -> nn.Sequential:
    """The layers of one process."""
    pairs = (
        nn.Sequential(nn.Linear(h, 4 * h, bias=False), nn.GELU(), nn.Linear(4 * h, h, bias=False))
        for _ in range(PAIRS)
    )
    return nn.Sequential(*pairs)


def one(ranks: int) -> tuple[nn.Module, Tensor]:
    """Each rank has columns of the first matrix and rows of the second, and all inputs."""
    h, times = SIZES[ranks]
    mesh = init_device_mesh("cpu", (ranks,))
    model = plain(h)
    for pair in model:
        parallelize_module(pair, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.randn(times * h, h)


def two(ranks: int) -> tuple[nn.Module, Tensor]:
    """Blocks on a mesh of 8 x 8 or 4 x 2."""
    h, times = SIZES[ranks]
    across = 8 if ranks == 64 else 2
    down = ranks // across
    mesh = init_device_mesh("cpu", (down, across), mesh_dim_names=("down", "across"))
    pairs = (
        nn.Sequential(Linear2D(h, 4 * h, mesh), nn.GELU(), Linear2D(4 * h, h, mesh))
        for _ in range(PAIRS)
    )
    return nn.Sequential(*pairs), torch.randn(times * h // down, h // across)


def three(ranks: int) -> tuple[nn.Module, Tensor]:
    """A cube, whose inputs and outputs stay in parts as they would between other layers."""
    h, times = SIZES[ranks]
    mesh = cube_mesh(round(ranks ** (1 / 3)), "cpu")
    model = parallelize_3d(plain(h), mesh)
    for hooks in (model._forward_hooks, model._forward_pre_hooks):
        hooks.clear()  # which make whole tensors of the outputs
    cube = model[0][0].cube
    part = torch.randn(times * h // cube.q**2, h // cube.q)
    return model, DTensor.from_local(part, mesh, cube.activations("l", 2))


KINDS = {"1-D": one, "2-D": two, "3-D": three}


def step(model: nn.Module, inputs: Tensor) -> None:
    """A forward and backward pass; the inputs need gradients, as between other layers."""
    outputs = model(inputs.detach().requires_grad_())
    part = outputs.to_local() if isinstance(outputs, DTensor) else outputs
    part.backward(torch.ones_like(part))


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def counted(kind: str, ranks: int = 64) -> dict[str, float]:
    """MB that a rank receives and has, per pair of layers, on a fake process group."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        there = local(tensor)
        there = there.wait() if isinstance(there, AsyncCollectiveTensor) else there
        kept[there.untyped_storage().data_ptr()] = there.untyped_storage().nbytes()
        return tensor

    with playing_one_of(ranks), MovedBytes() as moved:
        model, inputs = KINDS[kind](ranks)
        before = moved.received
        given = inputs.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = local(model(given))
        for each in model.parameters():
            kept.pop(local(each).untyped_storage().data_ptr(), None)
        outputs.backward(torch.ones_like(outputs))
        received = moved.received - before
        own = sum(2 * local(each).numel() * each.element_size() for each in model.parameters())
    return {
        "received_mb": received / 1e6 / PAIRS,
        "parameters_and_gradients_mb": own / 1e6 / PAIRS,
        "kept_mb": sum(kept.values()) / 1e6 / PAIRS,
    }


def _rank(kind: str, rank: int, ranks: int, address: str, steps: int) -> list[float]:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    model, inputs = KINDS[kind](ranks)
    seconds = []
    for _ in range(steps):
        dist.barrier()
        began = time.monotonic()
        step(model, inputs)
        seconds.append(time.monotonic() - began)
    return seconds


def seconds_a_step(kind: str, steps: int, ranks: int = 8) -> dict[str, float]:
    """The median over steps, but for the first, of the slowest rank; and what a link carried."""
    with tempfile.TemporaryDirectory() as name, LinkedHosts(ranks - 1, Path(name)) as linked:
        linked.limit(MBIT)
        hosts = linked._hosts.hosts
        address = f"tcp://{hosts[0].address}:29500"
        before = traffic_of(hosts[-1].link)
        parts = [partial(_rank, kind, rank, ranks, address, steps) for rank in range(ranks)]
        ranks_seconds = linked.call(parts, deadline_s=240.0)
        received = traffic_of(hosts[-1].link).since(before).received_payload
    slowest = [max(each) for each in zip(*ranks_seconds, strict=True)]
    return {
        "seconds": statistics.median(slowest[1:]) / PAIRS,
        "received_mb": received / 1e6 / steps / PAIRS,
    }


def modelled(rows_a_width: float = 10.0) -> dict[str, float]:
    """Seconds of 1-D and 2-D over those of 3-D on 64 devices, if 1-D takes the published 2.32.

    Assumptions: of a transformer's block only the products count (h -> 3 h -> h, h -> 4 h ->
    h), on m rows; all devices compute at one rate, and receive at one rate whatever the others do;
    nothing is hidden behind computing, and messages cost bytes alone. The one unknown, the time to
    compute in units of that to receive m h values, is what gives 2.32. 1-D: four all-reduces of m h
    in rings. 2-D: SUMMA forward and back, by broadcasts that are pipelined, or go along a tree.

    Args:
        rows_a_width: m / h; 10 is 64 sequences of 512 at h = 3,277.
    """
    q2, q3 = 8, 4
    inputs, weights, outputs = 7.0, 12 / rows_a_width, 9.0  # in units of m h
    one_d = 8 * 63 / 64
    three_d = 2 * (q3 - 1) / q3**3 * (inputs + weights + outputs)
    published = 2.32
    computing = (one_d - published * three_d) / (published - 1)
    two_d = {
        "pipelined": 3 * (q2 - 1) / q2**2 * (inputs + weights),
        "tree": 3 * q2 * 3 / q2**2 * (inputs + weights),
    }
    return {"computing": computing, "1-D / 3-D": published} | {
        f"2-D / 3-D, {how}": (computing + each) / (computing + three_d)
        for how, each in two_d.items()
    }


def main() -> None:
    """Counts, measures and reports."""
    chosen = harness.arguments(__doc__, repeats=1)
    counts = {kind: counted(kind) for kind in KINDS}
    for kind, count in counts.items():
        print(f"{kind}, 64 ranks:", {name: round(value, 2) for name, value in count.items()})
    model = modelled()
    print("64 devices, modelled:", {name: round(value, 2) for name, value in model.items()})
    steps = 2 if chosen.quick else 5
    turns = {kind: partial(seconds_a_step, kind, steps) for kind in KINDS}
    measured = harness.interleave(turns, repeats=chosen.repeats)
    seconds = {
        kind: harness.show(
            f"{kind}, 8 ranks", [each["seconds"] for each in values], unit="s a pair"
        )
        for kind, values in measured.items()
    }
    memory = {
        kind: count["parameters_and_gradients_mb"] + count["kept_mb"]
        for kind, count in counts.items()
    }
    received = {kind: count["received_mb"] for kind, count in counts.items()}
    claims = [
        harness.Claim(
            name=f"64 ranks, {what}: {less} / {more}", ratio=of[less] / of[more], target=1
        )
        for what, of in (("bytes", received), ("memory", memory))
        for more, less in (("1-D", "2-D"), ("2-D", "3-D"))
    ]
    claims.append(
        harness.Claim(
            name="8 ranks at 100 Mbit/s: seconds, 3-D / 1-D",
            ratio=seconds["3-D"] / seconds["1-D"],
            target=1,
        )
    )
    figures = {"counted_at_64": counts, "measured_at_8": measured, "modelled_at_64": model}
    harness.report("cube_layers", claims, figures)


if __name__ == "__main__":
    main()
