"""The layers that a cube of ranks computes together; see ``sparkdl.parallel.cube``.

Each is torch's own class with another ``forward``. It takes a DTensor of any placements, or a
plain tensor that all ranks have, and returns a DTensor. Attention stays torch's own function, for
which DTensor lacks a rule.
"""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from sparkdl.errors import ConfigError
from sparkdl.parallel.cube import AXES, Axis, Cube, other, padded

Rule = tuple[list[Placement], list[Placement | None]]


class CubeLayer(nn.Module):
    """What the layers have in common.

    Attributes:
        cube: the ranks.
        path: the layer's name in the model.
        columns: the axis over which the inputs' features lie, or an Embedding's outputs'.
    """

    cube: Cube
    path: str
    columns: Axis
    _told = False

    def arranged(self, inputs: Tensor, columns: Axis) -> DTensor:
        """The inputs with their features over an axis and their rows over the two others.

        Raises:
            ConfigError: the rows do not divide.
        """
        q = self.cube.q
        if inputs.ndim < 2 or inputs.shape[0] % q**2:
            raise ConfigError(
                f"'{self.path}' got inputs of shape {tuple(inputs.shape)}, whose first dimension, "
                f"the rows of the minibatch, must be a multiple of q^2 = {q**2}. "
                f"Take minibatches of {padded(inputs.shape[0] if inputs.ndim else 1, q**2)} rows"
            )
        inputs = self.cube.replicated(inputs)
        wanted = self.cube.activations(columns, inputs.ndim)
        if inputs.placements == self.cube.activations(other(columns), inputs.ndim):
            self._tell()
        return inputs.redistribute(placements=wanted)

    def _tell(self) -> None:
        if not self._told and self.cube.mesh.get_rank() == 0:
            warnings.warn(
                f"the inputs of '{self.path}' lie as for the other kind of Linear, so each call "
                "exchanges them. Name all that take another Linear's outputs in parallelize_3d's "
                "`second`",
                stacklevel=2,
            )
        self._told = True


class Linear3D(nn.Linear, CubeLayer):
    """``nn.Linear``, a product of the paper."""

    def forward(self, input: Tensor) -> Tensor:
        """Inputs of shape (rows, ..., in_features), rows a multiple of q^2."""
        cube, columns, rows = self.cube, self.columns, other(self.columns)
        part = cube.gather(self.arranged(input, columns).to_local(), rows)
        weight = cube.gather(cast("DTensor", self.weight).to_local(), "i")
        outputs = cube.scatter_sum(F.linear(part, weight), columns)
        if self.bias is not None:
            outputs = outputs + cube.vector(cast("DTensor", self.bias), rows)
        return DTensor.from_local(outputs, cube.mesh, cube.activations(rows, outputs.ndim))


class LayerNorm3D(nn.LayerNorm, CubeLayer):
    """``nn.LayerNorm`` over the last dimension: two sums over the ranks that have its parts."""

    def forward(self, input: Tensor) -> Tensor:
        """Inputs of shape (rows, ..., features), rows a multiple of q^2; the outputs lie alike."""
        cube, columns = self.cube, self.columns
        if isinstance(input, DTensor):
            there = cube.activations(other(columns), input.ndim)
            columns = other(columns) if input.placements == there else columns
        inputs = self.arranged(input, columns) if columns == self.columns else input
        part = cast("DTensor", inputs).to_local()
        (size,) = self.normalized_shape
        # In two passes: the mean of squares less the square of the mean loses digits.
        part = part - cube.sum(part.sum(-1, keepdim=True), columns) / size
        variance = cube.sum(part.square().sum(-1, keepdim=True), columns) / size
        outputs = part * (variance + self.eps).rsqrt()
        if self.weight is not None:
            outputs = outputs * cube.vector(cast("DTensor", self.weight), columns)
        if self.bias is not None:
            outputs = outputs + cube.vector(cast("DTensor", self.bias), columns)
        return DTensor.from_local(outputs, cube.mesh, cube.activations(columns, outputs.ndim))


class Embedding3D(nn.Embedding, CubeLayer):
    """``nn.Embedding``, as the product of rows of zeros and a one with the table.

    The numbers of the rows are on every rank, so that nothing is gathered of them.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Inputs of shape (rows, ...), whole on every rank or a DTensor.

        If q^2 does not divide the first dimension, as of positions of shape (1, length), the
        outputs have all rows on every rank.
        """
        cube, rows = self.cube, other(self.columns)
        numbers = input.full_tensor() if isinstance(input, DTensor) else input
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < (
            self.num_embeddings
        ):
            raise IndexError(
                f"'{self.path}' got numbers from {int(numbers.min())} to {int(numbers.max())}, "
                f"and has a table of {self.num_embeddings} rows"
            )
        divides = numbers.ndim > 0 and numbers.shape[0] % cube.q**2 == 0
        if divides:  # those of this rank and of the ranks that differ in `rows`
            here = cube.mesh.get_local_rank("i")
            numbers = torch.cat(numbers.chunk(cube.q**2)[here :: cube.q])
        table = cube.gather(cast("DTensor", self.weight).to_local(), "i", 1, copies=not divides)
        first = cube.mesh.get_local_rank(rows) * table.shape[0]
        numbers = numbers - first
        absent = (numbers < 0) | (numbers >= table.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < table.shape[0]:
            padding = None
        found = F.embedding(numbers.masked_fill(absent, 0), table, padding)
        found = found.masked_fill(absent.unsqueeze(-1), 0)
        if divides:
            outputs = cube.scatter_sum(found, rows)
            placements = cube.activations(self.columns, outputs.ndim)
        else:
            outputs = cube.sum(found, rows, copies=True)
            placements = cube.placements({self.columns: outputs.ndim - 1})
        return DTensor.from_local(outputs, cube.mesh, placements)


class Dropout3D(nn.Dropout, CubeLayer):
    """``nn.Dropout`` with a mask of its own for each part, and the same for copies of a part."""

    def forward(self, input: Tensor) -> Tensor:
        """Any inputs; plain tensors are taken as torch's own module does."""
        if not isinstance(input, DTensor) or not self.training or not self.p:
            return super().forward(input)
        place = 0
        for axis, placement in zip(AXES, input.placements, strict=True):
            if isinstance(placement, Shard):
                place = place * self.cube.q + self.cube.mesh.get_local_rank(axis)
            elif placement.is_partial():
                raise ConfigError(f"'{self.path}' got sums that are not complete")
        part = input.to_local()
        # All ranks draw the same number. torch.utils.checkpoint draws it again.
        seed = int(torch.randint(2**53, ())) + place
        generator = torch.Generator(part.device).manual_seed(seed)
        kept = torch.rand(part.shape, generator=generator, device=part.device) >= self.p
        outputs = part * kept / (1 - self.p) if self.p < 1 else part * 0
        return DTensor.from_local(outputs, input.device_mesh, input.placements)


@cache
def register_attention() -> None:
    """Tell DTensor that attention keeps rows and heads apart: its rule for torch's kernel on CPUs.

    torch has such rules for its kernels on GPUs. Inputs have shape (rows, heads, positions,
    features).
    """
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    register_sharding(forward)(partial(_attention, 3, 2))
    register_sharding(backward)(partial(_attention, 6, 3))


def _attention(
    inputs: int, outputs: int, *arguments: Any, attn_mask: Any = None, **_: Any
) -> list[Rule]:
    """How tensors lie along a dimension of a mesh: on each rank whole, or by rows, or by heads.

    Args:
        inputs: how many of the arguments are tensors; numbers follow.
        outputs: how many tensors are returned.
        *arguments: of the kernel.
        attn_mask: its mask, of which each rank has all.
    """
    # DTensor keeps a rule for later calls whatever their masks, so one that splits them would be
    # taken for others too. This one fails in the kernel then.
    if attn_mask is not None and any(size > 1 for size in attn_mask.shape[:-2]):
        raise ConfigError(
            f"scaled_dot_product_attention: attn_mask of shape {tuple(attn_mask.shape)} differs by "
            "row or head, which DTensor cannot divide. Take one of shape (positions, positions)"
        )
    numbers: list[Placement | None] = [None] * (len(arguments) - inputs)
    mask: list[Placement | None] = [] if attn_mask is None else [Replicate()]
    return [
        ([where] * outputs, [*[where] * inputs, *numbers, *mask])
        for where in (Replicate(), Shard(0), Shard(1))
    ]
