"""Lay a model's layers out in a cube of ranks."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_module, distribute_tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only

from sparkdl.errors import ConfigError
from sparkdl.parallel.cube import Axis, Cube, other, padded, require_cube
from sparkdl.parallel.layers import (
    CubeLayer,
    Dropout3D,
    Embedding3D,
    LayerNorm3D,
    Linear3D,
    register_attention,
)

M = TypeVar("M", bound=nn.Module)

KINDS: dict[type[nn.Module], type[CubeLayer]] = {
    nn.Linear: Linear3D,
    nn.LayerNorm: LayerNorm3D,
    nn.Embedding: Embedding3D,
    nn.Dropout: Dropout3D,
}
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
        layer.__class__ = KINDS[type(layer)]
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
    sizes: Iterable[tuple[str, int, int]] = ()
    if isinstance(layer, nn.Linear):
        sizes = [("in_features", layer.in_features, 1), ("out_features", layer.out_features, 2)]
    elif isinstance(layer, nn.LayerNorm):
        if len(layer.normalized_shape) != 1:
            raise ConfigError(
                f"'{name}' normalizes {len(layer.normalized_shape)} dimensions "
                f"{tuple(layer.normalized_shape)}, and only the last one can lie in parts. "
                "Flatten them, or normalize the last one"
            )
        sizes = [("normalized_shape", layer.normalized_shape[0], 1)]
    elif isinstance(layer, nn.Embedding):
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise ConfigError(
                f"'{name}' has max_norm, scale_grad_by_freq or sparse, which need whole rows of "
                "the table. Leave them out"
            )
        sizes = [
            ("num_embeddings", layer.num_embeddings, 1),
            ("embedding_dim", layer.embedding_dim, 2),
        ]
    for kind, size, power in sizes:
        if size % q**power:
            of = "q" if power == 1 else "q^2"
            raise ConfigError(
                f"'{name}' has {kind}={size}, which {of} = {q**power} does not divide. "
                f"Pad it to {padded(size, q**power)}"
            )
    missing = [kind for kind in _sharded(layer, RESIDUAL) if kind not in layer._parameters]
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
