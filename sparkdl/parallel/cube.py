"""A cube of ranks, and how matrices lie in it: 3-D tensor parallelism.

Bian, Xu, Wang and You 2021, "Maximizing Parallelism in Distributed Training for Huge Neural
Networks" (arXiv 2105.14450). q^3 ranks have coordinates i, j and l. Of a product Y = X A, rank
(i, j, l) holds 1 / q^3 of each matrix:

    X   rows over i and j, columns over l
    A   rows over l, columns over j and i
    Y   rows over i and l, columns over j

X is gathered over j and A over i, so that each rank multiplies what it has of them, and the
products are summed over l where the rows of Y go. Y lies as X does with j and l exchanged, so the
next product exchanges both. The backward pass is what autograd makes of it: dY is gathered over l,
and dX and dA are summed over j and i. Each of the six collectives moves (q - 1) / q^3 of a matrix
to each rank, 6 (q - 1) / q^3 in all.

Activations are DTensors, whose shape is that of the whole. The mesh has i last because DTensor
divides by the last dimension of a mesh last: then all of these are plain ``Shard``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from sparkdl.arguments import require_whole
from sparkdl.errors import ConfigError

AXES = ("j", "l", "i")
Axis = Literal["j", "l"]
"""Over which columns lie; rows lie over the other one and i."""


def other(axis: Axis) -> Axis:
    """The axis over which the rows lie."""
    return "l" if axis == "j" else "j"


@dataclass(frozen=True)
class Cube:
    """A mesh of q x q x q ranks.

    Attributes:
        mesh: its dimensions are named j, l and i.
    """

    mesh: DeviceMesh

    @property
    def q(self) -> int:
        """Ranks along an edge."""
        return self.mesh.size(0)

    @cached_property
    def lines(self) -> dict[str, DeviceMesh]:
        """For each axis, the ranks that differ from this one in that coordinate alone."""
        return {axis: self.mesh[axis] for axis in AXES}

    def activations(self, columns: Axis, dims: int) -> tuple[Placement, ...]:
        """How activations lie.

        Args:
            columns: the axis over which their last dimension lies.
            dims: number of dimensions.
        """
        return self.placements({columns: dims - 1, other(columns): 0, "i": 0})

    def placements(self, sharded: dict[str, int]) -> tuple[Placement, ...]:
        """DTensor's placements, given the dimension of the tensor that lies over each axis."""
        return tuple(Shard(sharded[axis]) if axis in sharded else Replicate() for axis in AXES)

    def gather(self, part: Tensor, axis: str, dim: int = 0) -> Tensor:
        """The parts along an axis, one after another.

        Args:
            part: of this rank.
            axis: over which they lie.
            dim: the dimension of the parts that lies there.
        """
        sent = part.expand(self.q, *part.shape).flatten(0, 1)
        parts_in_turn = self._exchange(sent, axis)
        return torch.cat(parts_in_turn.chunk(self.q), dim) if dim else parts_in_turn

    def scatter_sum(self, summand: Tensor, axis: str) -> Tensor:
        """This rank's rows of the sum along an axis."""
        return torch.stack(self._exchange(summand, axis).chunk(self.q)).sum(0)

    def _exchange(self, parts: Tensor, axis: str) -> Tensor:
        """Each rank of a line gets what the others have for it, in their order.

        gloo's reduce-scatter moves as much as an all-reduce, twice what is needed.
        """
        return all_to_all_single_autograd(parts.contiguous(), None, None, self.lines[axis])

    def sum(self, summand: Tensor, axis: str) -> Tensor:
        """The sum along an axis, on all of its ranks."""
        summands = DTensor.from_local(summand, self.lines[axis], [Partial()])
        return summands.full_tensor(grad_placements=[Partial()])

    def vector(self, parameter: DTensor, columns: Axis) -> Tensor:
        """A bias or scale where activations lie: its part for their columns here."""
        part = parameter.redistribute(placements=self.placements({columns: 0})).to_local()
        for axis in AXES:
            if axis != columns:  # its gradients are summed over the ranks that have it too
                copies = DTensor.from_local(part, self.lines[axis], [Replicate()])
                part = copies.to_local(grad_placements=[Partial()])
        return part

    def replicated(self, tensor: Tensor) -> DTensor:
        """A tensor that all ranks have, as one that can be redistributed."""
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.mesh, [Replicate()] * 3)


def require_edge(q: int, world_size: int) -> int:
    """Check that so many ranks make a cube with this edge.

    Raises:
        ConfigError: they do not, or q is not a whole number >= 2.
    """
    q = require_whole("q", q, 2)
    if q**3 != world_size:
        edge = max(2, round(world_size ** (1 / 3)))
        fits = " or ".join(f"num_workers={each**3} with q={each}" for each in (edge, edge + 1))
        raise ConfigError(
            f"a cube with q={q} has {q} x {q} x {q} = {q**3} workers, and this run has "
            f"{world_size}. Use {fits}"
        )
    return q


def cube_mesh(q: int, device: str) -> DeviceMesh:
    """Arrange all ranks of the default process group as a cube.

    Args:
        q: ranks along an edge.
        device: of this rank, such as ``cpu`` or ``cuda:0``.

    Raises:
        ConfigError: the ranks make no such cube.
    """
    q = require_edge(q, dist.get_world_size())
    mesh = init_device_mesh(torch.device(device).type, (q, q, q), mesh_dim_names=AXES)
    for axes in (("j", "l"), ("j", "i"), ("l", "i"), AXES):
        mesh[axes]._flatten("".join(axes))  # DTensor logs that it lacks them otherwise
    return mesh


def require_cube(mesh: DeviceMesh) -> Cube:
    """Take a mesh that ``cube_mesh`` made.

    Raises:
        ConfigError: it is another one.
    """
    named = getattr(mesh, "mesh_dim_names", None)
    if not isinstance(mesh, DeviceMesh) or named != AXES or len(set(mesh.shape)) != 1:
        raise ConfigError(f"mesh must be that of worker.mesh(q=...), got {mesh!r:.200}")
    return Cube(mesh)


def padded(size: int, divisor: int) -> int:
    """The next size that a divisor divides."""
    return math.ceil(size / divisor) * divisor
