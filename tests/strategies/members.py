"""A group of workers as threads of this process, which adds in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 30.0


@dataclass
class Member:
    """Of a ``Collective``, what the exchange of gradients uses; counts what it sends."""

    index: int
    world_size: int
    barrier: Barrier
    shown: list[Any]
    octets: int = field(default=0)

    @property
    def members(self) -> range:
        return range(self.world_size)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        everyones = self._exchange(tensor.clone())
        return tensor.copy_(torch.stack(everyones).sum(0))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._exchange(tensor.clone())

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return torch.stack([each[self.index] for each in self._exchange(tensor.clone())])

    def tell(self, value: Any) -> list[Any]:
        """What everyone tells, by index."""
        self.shown[self.index] = value
        self.barrier.wait(PATIENCE_S)
        everyones = list(self.shown)
        self.barrier.wait(PATIENCE_S)
        return everyones

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        self.octets += mine.nbytes
        everyones = self.tell(mine)
        assert len({(each.shape, each.dtype) for each in everyones}) == 1
        return everyones


def of_all(world_size: int, body: Callable[[Any], Any]) -> list[Any]:
    """What ``body`` returns for each member; it is called for all at the same time."""
    barrier, shown = Barrier(world_size), [None] * world_size
    members = [Member(rank, world_size, barrier, shown) for rank in range(world_size)]

    def guarded(member: Member) -> Any:
        try:
            return body(member)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(guarded, members))


Places = dict[int, Tensor]


def steps_of(
    member: Member, gradients: Callable[[int, int], Places], settings: Any, steps: int
) -> list[tuple[Places, Places, Places]]:
    """(M, what all have agreed on, errors) of some steps, on a member's own random gradients."""
    compressor, done = settings.compressor(member, None), []
    for step in range(steps):
        given = gradients(member.index, step)
        asked = {
            place: each + compressor.errors[place].view_as(each)
            if place in compressor.errors
            else each.clone()
            for place, each in given.items()
        }
        compressor.average(given)
        done.append((asked, given, {p: e.clone() for p, e in compressor.errors.items()}))
    return done
