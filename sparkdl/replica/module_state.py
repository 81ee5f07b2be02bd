"""A module's state, kept so that a forward pass that changes it can be undone."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
"""The exact types whose contents are restored; subclasses may hold anything else besides."""


class ModuleState:
    """The current attributes of a module and all its submodules.

    It holds references, not copies: what a buffer held before it was written to in place is asked
    for when it has to be restored. It looks no deeper than into a list, dict, set or deque that is
    itself an attribute, and does not see writes through ``tensor.data``.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._containers = [(each, each.copy()) for each in _containers(module)]
        self.tensors = tensors_of(module)
        self._versions = [_version(tensor) for tensor in self.tensors]

    def put_back(self, contents: Callable[[], Sequence[Tensor]]) -> None:
        """Restore the module.

        Args:
            contents: called if a tensor was written to; gives what each of ``tensors`` held.
        """
        for container, copied in self._containers:
            if not _same(container, copied):
                container.clear()
                extend = getattr(container, "update", None) or container.extend
                extend(copied)
        if self._versions == [_version(tensor) for tensor in self.tensors]:
            return
        with torch.no_grad():
            for tensor, version, held in zip(self.tensors, self._versions, contents(), strict=True):
                # Batch normalization writes to running means without raising the version.
                if _version(tensor) != version or not torch.equal(tensor, held.to(tensor)):
                    tensor.copy_(held)
        self._versions = [_version(tensor) for tensor in self.tensors]


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters, buffers and other tensors of a module; equal modules give the same order."""
    return [
        value
        for container in _containers(module)
        for value in (container.values() if isinstance(container, dict) else container)
        if isinstance(value, Tensor)
    ]


def _containers(module: nn.Module) -> Iterator[Any]:
    """The attributes of all modules, one dict per module, and the containers among them."""
    for each in module.modules():
        yield each.__dict__
        yield from (held for held in each.__dict__.values() if type(held) in _CONTAINERS)


def _same(container: Any, copied: Any) -> bool:
    """Whether both hold the very same objects; tensors cannot be compared for equality."""
    if len(container) != len(copied):
        return False
    if isinstance(container, set):
        return bool(container == copied)
    if isinstance(container, dict):
        pairs = zip(container.items(), copied.items(), strict=True)
        return all(a is b and v is w for (a, v), (b, w) in pairs)
    return all(a is b for a, b in zip(container, copied, strict=True))


def _version(tensor: Tensor) -> int | None:
    """Rises when a tensor is written to; None for a tensor made in inference mode."""
    return None if tensor.is_inference() else tensor._version
