"""Workers without a run: a group as threads of this process, and pairs that visit each other."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkdl.errors import DisconnectedError, TrainingError
from sparkdl.transport.connection import Connection

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


class Hosts(Protocol):
    def host(self, connection: Connection, asked: dict[str, Any]) -> None: ...


@contextmanager
def connected(host: Hosts) -> Iterator[Connection]:
    """A connection to a worker that serves visits until the visitor has left."""
    here, there = (Connection(end, 5.0) for end in socket.socketpair())
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def serve() -> None:
        try:
            while True:
                host.host(there, there.receive_header())
        except DisconnectedError:
            pass
        except TrainingError as error:
            errors.put(error)
        finally:
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield here
    finally:
        here.close()
        thread.join(60)
        assert not thread.is_alive()
    if not errors.empty():
        raise errors.get()
