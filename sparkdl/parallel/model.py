"""Lay a model's layers out in a cube of ranks, which computes them together.

Each layer is torch's own class with another ``forward``. It takes a DTensor of any placements, or a
plain tensor that all ranks have, and returns a DTensor. Attention stays torch's own function, for
which DTensor lacks a rule.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import register_sharding
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only

from sparkdl.errors import ConfigError
from sparkdl.parallel.cube import AXES, Axis, Cube, other, padded, require_cube

M = TypeVar("M", bound=nn.Module)
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
        is_other = inputs.placements == self.cube.activations(other(columns), inputs.ndim)
        if is_other and not self._told and self.cube.mesh.get_rank() == 0:
            warnings.warn(
                f"the inputs of '{self.path}' lie as for the other kind of Linear, so each call "
                "exchanges them. Name all that take another Linear's outputs in parallelize_3d's "
                "`second`",
                stacklevel=2,
            )
            self._told = True
        return inputs.redistribute(placements=wanted)


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
        weight = cast("DTensor", self.weight)
        if not numbers.ndim or numbers.shape[0] % cube.q**2:
            whole = weight.redistribute(placements=cube.placements({self.columns: 1})).to_local()
            found = F.embedding(numbers, whole, self.padding_idx)
            placements = cube.placements({self.columns: found.ndim - 1})
            return DTensor.from_local(found, cube.mesh, placements)
        # Those of this rank and of the ranks that differ in `rows`.
        numbers = torch.cat(numbers.chunk(cube.q**2)[cube.mesh.get_local_rank("i") :: cube.q])
        table = cube.gather(weight.to_local(), "i", 1)
        first = cube.mesh.get_local_rank(rows) * table.shape[0]
        numbers = numbers - first
        absent = (numbers < 0) | (numbers >= table.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < table.shape[0]:
            padding = None
        found = F.embedding(numbers.masked_fill(absent, 0), table, padding)
        outputs = cube.scatter_sum(found.masked_fill(absent.unsqueeze(-1), 0), rows)
        placements = cube.activations(self.columns, outputs.ndim)
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


KINDS: dict[type[nn.Module], tuple[type[CubeLayer], tuple[str, ...]]] = {
    nn.Linear: (Linear3D, ("out_features", "in_features")),
    nn.LayerNorm: (LayerNorm3D, ("normalized_shape",)),
    nn.Embedding: (Embedding3D, ("num_embeddings", "embedding_dim")),
    nn.Dropout: (Dropout3D, ()),
}
"""What a layer becomes, and what gives the sizes of its weight."""
RESIDUAL: Axis = "l"
"""Over which features lie where an Embedding ends, a pair of Linear starts, and another ends."""


def parallelize_3d(module: M, mesh: DeviceMesh, *, second: str | Sequence[str] | None = None) -> M:
    """Have a cube of q^3 workers compute a model together, each with 1 / q^3 of it.

    The 3-D tensor parallelism of Bian et al. 2021 (arXiv 2105.14450). ``nn.Linear``,
    ``nn.LayerNorm``, ``nn.Embedding`` and ``nn.Dropout`` are changed in place. Each worker keeps
    1 / q^3 of the matrices and 1 / q of the vectors; parameters and buffers of all other modules
    stay whole on each, as does what they compute of parts torch's DTensor decides. All parameters
    become DTensors with the values of rank 0, so make the optimizer afterwards.

    The model is then called on every worker with the same, whole minibatch, whose first dimension
    q^2 must divide, and returns whole outputs on every worker, so the loop is that of one process.
    A model that returns its loss spares the exchange of outputs. Within the model activations are
    DTensors; tensors that it makes itself can only meet them as buffers, or with the step in
    ``torch.distributed.tensor.experimental.implicit_replication()``.

    Linear layers are of two kinds, which take turns: what one gives lies as the other wants it. One
    that gets the other arrangement exchanges its inputs at each call, and warns.

    torch's random generator for the CPU is set to that of rank 0 on all workers, which must draw
    the same numbers from then on.

    Args:
        module: the same on every worker except for the values.
        mesh: of ``worker.mesh(q)``.
        second: patterns, as for file names, of the names of those ``nn.Linear`` that take what
            another gave, such as ``("*.proj", "*.fc2")``. By default every second one in the order
            of ``named_modules``.

    Returns:
        The module itself.

    Raises:
        ConfigError: a layer's sizes do not divide, it shares a parameter with another one, it
            cannot be computed in parts, or the module is parallel already.
    """
    cube = require_cube(mesh)
    register_attention()
    layers = {name: each for name, each in module.named_modules() if type(each) in KINDS}
    _require_ordinary(module)
    axes = _axes(layers, second)
    for name, layer in layers.items():
        _require_divides(name, layer, cube.q)
    for name, layer in layers.items():
        sharded = _sharded(layer, axes[name])
        layer.__class__ = KINDS[type(layer)][0]
        split = cast("CubeLayer", layer)
        split.cube, split.path, split.columns = cube, name, axes[name]
        for kind, places in sharded.items():
            parameter = getattr(layer, kind)
            if parameter is not None:
                parts = distribute_tensor(parameter.detach(), mesh, cube.placements(places))
                setattr(layer, kind, nn.Parameter(parts, parameter.requires_grad))
    distribute_module(module, mesh)
    for each in module.parameters():
        if each.requires_grad:
            hook = partial(_complete, cast("DTensor", each).placements)
            each.register_hook(hook)  # type: ignore[no-untyped-call]
    module.register_forward_pre_hook(partial(_taken, cube), prepend=True, with_kwargs=True)
    module.register_forward_hook(_given)
    state = torch.get_rng_state().to(mesh.device_type)
    whole = distribute_tensor(state, mesh, cube.placements({}))
    torch.set_rng_state(whole.to_local().cpu())
    return module


def _complete(placements: Sequence[Placement], gradient: Tensor) -> Tensor:
    """Sums the gradient of a parameter of which several ranks have copies."""
    return cast("DTensor", gradient).redistribute(placements=placements)


def _taken(cube: Cube, _: nn.Module, inputs: Any, named: Any) -> Any:
    """The model's inputs as DTensors of which every rank has all."""
    return tree_map_only(torch.Tensor, cube.replicated, (inputs, named))


def _given(_: nn.Module, __: Any, outputs: Any) -> Any:
    """The model's outputs as plain tensors, whole on every rank."""
    return tree_map_only(DTensor, DTensor.full_tensor, outputs)


def _axes(layers: dict[str, nn.Module], second: str | Sequence[str] | None) -> dict[str, Axis]:
    linear = [name for name, each in layers.items() if type(each) is nn.Linear]
    if second is None:
        later = set(linear[1::2])
    else:
        patterns = [second] if isinstance(second, str) else list(second)
        later = {name for each in patterns for name in fnmatch.filter(linear, each)}
        for each in patterns:
            if not fnmatch.filter(linear, each):
                raise ConfigError(
                    f"second: no nn.Linear of this model has a name like {each!r}. It has "
                    + (", ".join(map(repr, linear[:20])) or "none")
                )
    return {name: other(RESIDUAL) if name in later else RESIDUAL for name in layers}


def _sharded(layer: nn.Module, columns: Axis) -> dict[str, dict[str, int]]:
    """For each parameter of a layer, which of its dimensions lies over which axis."""
    if isinstance(layer, nn.Linear):
        rows = other(columns)
        return {"weight": {columns: 1, rows: 0, "i": 0}, "bias": {rows: 0}}
    if isinstance(layer, nn.LayerNorm):
        return {"weight": {columns: 0}, "bias": {columns: 0}}
    if isinstance(layer, nn.Embedding):
        return {"weight": {columns: 1, other(columns): 0, "i": 1}}
    return {}


def _require_divides(name: str, layer: nn.Module, q: int) -> None:
    if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) != 1:
        raise ConfigError(
            f"'{name}' normalizes {len(layer.normalized_shape)} dimensions "
            f"{tuple(layer.normalized_shape)}, and only the last one can lie in parts. "
            "Flatten them, or normalize the last one"
        )
    if isinstance(layer, nn.Embedding) and (
        layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
    ):
        raise ConfigError(
            f"'{name}' has max_norm, scale_grad_by_freq or sparse, which need whole rows of "
            "the table. Leave them out"
        )
    sharded = _sharded(layer, RESIDUAL)
    for dim, kind in enumerate(KINDS[type(layer)][1]):
        given = getattr(layer, kind)
        size = given[0] if isinstance(given, tuple) else given
        divisor = q ** [*sharded["weight"].values()].count(dim)
        if size % divisor:
            raise ConfigError(
                f"'{name}' has {kind}={size}, which {'q' if divisor == q else 'q^2'} = {divisor} "
                f"does not divide. Pad it to {padded(size, divisor)}"
            )
    missing = [kind for kind in sharded if kind not in layer._parameters]
    if missing:
        raise ConfigError(
            f"the {missing[0]} of '{name}' is computed from others, as by weight_norm. Remove that"
        )


def _require_ordinary(module: nn.Module) -> None:
    owners: dict[nn.Parameter, str] = {}
    for name, each in module.named_modules(remove_duplicate=False):
        if isinstance(each, CubeLayer) or any(
            isinstance(one, DTensor) for one in each.parameters(recurse=False)
        ):
            raise ConfigError(f"'{name}' is parallel already: parallelize_3d takes plain modules")
        found = None
        if isinstance(each, (_DropoutNd, nn.RReLU)) and type(each) is not nn.Dropout:
            found = "draws random numbers, which would be the same in each part. Use nn.Dropout"
        elif isinstance(each, _NormBase):
            found = "needs statistics over the rows of all workers. Use nn.LayerNorm"
        if found:
            raise ConfigError(f"'{name}', a {type(each).__name__}, {found}")
        for kind, parameter in each.named_parameters(recurse=False):
            where = f"{name}.{kind}".lstrip(".")
            if parameter in owners:
                raise ConfigError(
                    f"'{where}' is tied: it is '{owners[parameter]}' too, and each would lie in "
                    "the cube in another way. Give each layer a parameter of its own"
                )
            owners[parameter] = where
