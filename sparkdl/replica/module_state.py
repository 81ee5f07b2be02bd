"""What a module holds, so that a forward pass which changes it can be undone."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
"""Types, exactly, whose contents are put back; of subclasses nobody knows what else they hold."""


class ModuleState:
    """The attributes of a module and of all modules in it, as they are now.

    It refers to them instead of copying: what a buffer held before it was written to in place is
    asked for when it has to be put back. What lies deeper than in a list, dict, set or deque that
    is an attribute itself is not looked at, nor is what is written through ``tensor.data``.

    Args:
        module: whose state it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._containers = [(each, each.copy()) for each in _containers(module)]
        self.tensors = tensors_of(module)
        self._versions = [_version(tensor) for tensor in self.tensors]

    def put_back(self, contents: Callable[[], Sequence[Tensor]]) -> None:
        """Have the module as it was.

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
                # Batch normalization writes to running means without telling the version.
                if _version(tensor) != version or not torch.equal(tensor, held.to(tensor)):
                    tensor.copy_(held)
        self._versions = [_version(tensor) for tensor in self.tensors]


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters, buffers and other tensors of a module; of two equal modules in one order."""
    return [
        value
        for container in _containers(module)
        for value in (container.values() if isinstance(container, dict) else container)
        if isinstance(value, Tensor)
    ]


def _containers(module: nn.Module) -> Iterator[Any]:
    """The attributes of all modules, each module's as one dict, and those that hold several."""
    for each in module.modules():
        yield each.__dict__
        yield from (held for held in each.__dict__.values() if type(held) in _CONTAINERS)


def _same(container: Any, copied: Any) -> bool:
    """Whether one holds the very objects of the other; tensors cannot be asked for equality."""
    if len(container) != len(copied):
        return False
    if isinstance(container, set):
        return bool(container == copied)
    if isinstance(container, dict):
        pairs = zip(container.items(), copied.items(), strict=True)
        return all(a is b and v is w for (a, v), (b, w) in pairs)
    return all(a is b for a, b in zip(container, copied, strict=True))


def _version(tensor: Tensor) -> int | None:
    """Rises when a tensor is written to; None for one that only inference mode can write to."""
    return None if tensor.is_inference() else tensor._version
