"""The values that a training begins with: of lazy layers, and of a previously trained model.

Lazy layers learn the shapes of their parameters from a batch of zeros. A previously trained model
is the first center: its trained parameters and buffers are sent to the workers as usual. Parameters
that require no gradient are never sent, so they travel with the function that builds the model on
each worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparkdl.checkpoint.tensor_file import octets_of
from sparkdl.errors import ModelError
from sparkdl.feed.schema import FeedSchema, equal_rows
from sparkdl.protocols import ModelBuilder
from sparkdl.replica import forward
from sparkdl.replica.buffers import left_as_it_was
from sparkdl.replica.flat import persistent_buffers


def has_lazy_parameters(module: nn.Module) -> bool:
    """Whether a module needs its first batch to learn its parameters' shapes."""
    return any(map(is_lazy, [*module.parameters(), *module.buffers()]))


def initialized(
    model: ModelBuilder, schema: FeedSchema, *, features_as_kwargs: bool = False, items: int = 1
) -> nn.Module:
    """Build a model with lazy layers, and show it a batch of zeros; the caller seeds.

    Args:
        model: the builder.
        schema: the batch's tensors, all of known shapes except for padded ones.
        features_as_kwargs: as for ``Replica``.
        items: number of items in each padded row.
    """
    module = model()
    rows = [equal_rows(each, torch.zeros(2), items) for each in schema.stored]
    with left_as_it_was(module, values=False), torch.no_grad():
        features = schema.batch(rows, last=True).features
        forward(module.eval(), features, as_kwargs=features_as_kwargs)
    return module


class WarmStart:
    """The values of a trained model.

    Args:
        module: the model; later changes to it have no effect.
    """

    def __init__(self, module: nn.Module) -> None:
        self._values = {name: each.detach().cpu().clone() for name, each in _tensors(module)}

    def require_fits(self, module: nn.Module) -> None:
        """Check that a model has tensors of the same names, shapes and dtypes.

        Args:
            module: the model as built for the training.

        Raises:
            ModelError: it does not; the message names the first tensor that differs.
        """
        wanted = {name: _kind(each) for name, each in _tensors(module)}
        given = {name: _kind(each) for name, each in self._values.items()}
        other = [name for name in wanted | given if wanted.get(name) != given.get(name)]
        if other:
            first = other[0]
            raise ModelError(
                f"warm_start belongs to a different model: '{first}' is "
                f"{wanted.get(first, 'not there')} in the model to train, and "
                f"{given.get(first, 'not there')} in warm_start ({len(other)} tensors differ). "
                "Train the same model; to reuse parts of it, pass as model a function that "
                "loads them into the model it builds"
            )

    def builder(self, build: ModelBuilder, module: nn.Module) -> ModelBuilder:
        """The builder for workers: ``build``, plus the values of parameters that are never sent.

        Args:
            build: builds the model.
            module: what it built.
        """
        frozen = {
            name: self._values[name]
            for name, each in module.named_parameters(remove_duplicate=False)
            if not each.requires_grad
        }
        return partial(_with_values, build, frozen) if frozen else build

    def apply(self, module: nn.Module) -> None:
        """Overwrite the part of a model that is sent: trained parameters and buffers."""
        with torch.no_grad():
            for name, each in _tensors(module):
                if each.requires_grad or not isinstance(each, nn.Parameter):
                    each.copy_(self._values[name])

    def describe(self) -> str:
        """A description, to compare with a checkpoint's."""
        found = hashlib.sha256()
        for name, values in self._values.items():
            found.update(f"{name} {_kind(values)}\n".encode())
            found.update(octets_of(values))
        numel = sum(values.numel() for values in self._values.values())
        return f"{numel} values (SHA-256 {found.hexdigest()[:16]})"


def _with_values(model: ModelBuilder, values: Mapping[str, Tensor]) -> nn.Module:
    """Build a model, and overwrite some parameters by name; the caller seeds."""
    module = model()
    with torch.no_grad():
        for name, each in values.items():
            module.get_parameter(name).copy_(each)
    return module


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from persistent_buffers(module).items()


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
