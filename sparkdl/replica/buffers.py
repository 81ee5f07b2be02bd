"""What a forward pass may change.

Persistent buffers stay in their flat tensors whatever the model does with them. All others
are kept, so that a change can be undone.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.errors import TrainingError
from sparkdl.outputs import parts_of
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.replica.flat import apart_from, persistent_buffers, rebind_buffers


class Buffers:
    """The persistent buffers of a module, each with its place in a flat tensor.

    Args:
        module: the module; it has been flattened.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # A tensor that has several names is under each of them.
        self._homes = persistent_buffers(module)
        self._look()

    def reclaim(self) -> None:
        """Copy back buffers that the model reassigned instead of writing to (``self.b = ...``).

        Raises:
            TrainingError: a buffer has another shape or dtype now, or was added or removed.
        """
        if not self._as_left():
            for name, values in self._moved().items():
                self._homes[name].copy_(values)
                owner, _, own_name = name.rpartition(".")
                self._module.get_submodule(owner)._buffers[own_name] = self._homes[name]
            self._look()

    def release(self) -> None:
        """Give each buffer memory of its own."""
        self.reclaim()
        rebind_buffers(self._module, {id(home): home.clone() for home in self._homes.values()})

    def _look(self) -> None:
        """Note what the module and its parts hold."""
        tables: list[dict[str, Any]] = []
        for owner in self._module.modules():
            tables += (owner._buffers, owner._modules)
        self._filled = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._held = list(chain.from_iterable(table.values() for table in self._filled))

    def _as_left(self) -> bool:
        """Whether they still hold the same; to ask for names would take several times as long."""
        held = [each for table in self._filled for each in table.values()]
        same = len(held) == len(self._held) and all(map(is_, held, self._held))
        return same and not any(self._empty)

    def _moved(self) -> dict[str, Tensor]:
        """What to copy back, by name."""
        present = persistent_buffers(self._module)
        moved: dict[str, Tensor] = {}
        holders: dict[int, Tensor | None] = {}
        for name, home in self._homes.items():
            mine = present.pop(name, None)
            together = holders.setdefault(id(home), mine) is mine
            if together and mine is home:
                continue
            if together and mine is not None and _kind(mine) == _kind(home):
                moved[name] = apart_from(home, mine)
            elif not together:
                raise _changed(name, "the same tensor as another buffer", "a tensor of its own")
            else:
                raise _changed(name, _described(home), _described(mine))
        for name, added in present.items():
            raise _changed(name, _described(None), _described(added))
        return moved


def _changed(name: str, before: str, now: str) -> TrainingError:
    return TrainingError(
        f"the buffer '{name}' was {before} when the model was built, and is {now} now. Buffers "
        "are averaged like parameters, so each keeps its shape and dtype. Give it its final ones "
        "in __init__, or register it with persistent=False if each replica may have its own"
    )


def _kind(buffer: Tensor) -> tuple[torch.Size, torch.dtype]:
    return buffer.shape, buffer.dtype


def _described(buffer: Tensor | None) -> str:
    return "missing" if buffer is None else f"{str(buffer.dtype)[6:]} {tuple(buffer.shape)}"


_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
"""The exact types whose contents are restored; subclasses may hold anything else besides."""


class ModuleState:
    """The current attributes of a module and all its submodules.

    It holds references, not copies: what a buffer held before it was written to in place is asked
    for when it has to be restored. It looks no deeper than into a list, dict, set or deque that is
    itself an attribute, and does not see writes through ``tensor.data``.
    """

    def __init__(self, module: nn.Module) -> None:
        # Lazy layers become others in their first forward pass.
        self._classes = [(each, type(each)) for each in module.modules()]
        self._containers = [(each, each.copy()) for each in _containers(module)]
        self.tensors = tensors_of(module)
        self._versions = [_version(tensor) for tensor in self.tensors]

    def put_back(self, contents: Callable[[], Sequence[Tensor]]) -> None:
        """Restore the module.

        Args:
            contents: called if a tensor was written to; gives what each of ``tensors`` held.
        """
        for each, kind in self._classes:
            if type(each) is not kind:
                each.__class__ = kind
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


class OwnAttributes:
    """What a module keeps elsewhere than in its state: no replica exchanges that, nor returns it.

    Args:
        module: as it was built, on the CPU.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._state = module, ModuleState(module)
        self._held = [_kept(tensor) for tensor in self._state.tensors]
        self._built = dict(_own_attributes(module))

    def needed_for(self, predict: Callable[[], Any]) -> list[str]:
        """The names of those that have changed, if predictions depend on it; they are put back.

        Args:
            predict: returns what the model does.
        """
        changed = [
            name
            for name, (value, version) in _own_attributes(self._module)
            for before, then in [self._built.get(name, (None, None))]
            if value is not before or version != then
        ]
        if not changed:
            return []
        now, again = self._predicted(predict), self._predicted(predict)
        state = {k: each.clone() for k, each in persistent_buffers(self._module).items()}
        self._state.put_back(lambda: self._held)
        with torch.no_grad():
            for name, buffer in persistent_buffers(self._module).items():
                buffer.copy_(state[name])
        as_built = self._predicted(predict)
        steady = all(map(torch.equal, now, again))
        return [] if not steady or all(map(torch.equal, now, as_built)) else changed

    def _predicted(self, predict: Callable[[], Any]) -> list[Tensor]:
        with borrowed_random_numbers(0), left_as_it_was(self._module), torch.no_grad():
            returned = predict()
        parts = [returned] if isinstance(returned, Tensor) else parts_of(returned).values()
        return [each for each in parts if isinstance(each, Tensor)]


_OF_A_MODULE = frozenset(vars(nn.Module()))


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, tuple[Any, int | None]]]:
    for path, each in module.named_modules():
        own = vars(each)
        buffers = {
            name: own["_buffers"].get(name) for name in own.get("_non_persistent_buffers_set", ())
        }
        for name, value in {**own, **buffers}.items():
            if name not in _OF_A_MODULE:
                version = _version(value) if isinstance(value, Tensor) else None
                yield f"{path}.{name}".removeprefix("."), (value, version)


@contextmanager
def left_as_it_was(module: nn.Module, *, values: bool = True) -> Iterator[None]:
    """Let a module run on the CPU within the context, and put back what that changes.

    Args:
        module: any.
        values: whether that includes its attributes and buffers, not only training or evaluation
            mode.
    """
    modes = {each: each.training for each in module.modules()}
    state = ModuleState(module) if values else None
    held = [] if state is None else [_kept(tensor) for tensor in state.tensors]
    try:
        yield
    finally:
        for each, training in modes.items():
            each.training = training
        if state is not None:
            state.put_back(lambda: held)


def _kept(tensor: Tensor) -> Tensor:
    """A copy, except of a parameter, which may be large and which forward does not write to."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


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
