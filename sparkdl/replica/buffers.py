"""Persistent buffers, which stay in their flat tensors whatever the model does with them."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.errors import TrainingError
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
