"""Training processes of several sides that take turns, an epoch at a time.

Two processes that exchange gradients on two cores are at the mercy of whatever else runs there, and
of where the system puts their threads: runs of some seconds, one after another, may differ by a
third. Here all sides are alive, one trains while the others wait for their turn, and consecutive
epochs can be compared.
"""

import functools
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 120.0
"""Seconds for all processes to start, and for an epoch."""
_GO, _DONE = b"g", b"d"


class Turn:
    """A rank's end.

    Args:
        address: path of the socket of ``measure``.
        side: the side that the rank belongs to.
    """

    def __init__(self, address: str, side: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._socket.sendall(side.encode())

    def wait(self) -> None:
        """Wait until this side may train an epoch."""
        if self._socket.recv(1) != _GO:
            raise EOFError("the benchmark has ended")

    def done(self) -> None:
        """Say that the epoch has ended."""
        self._socket.sendall(_DONE)


turn_of = functools.cache(Turn)
"""The ``Turn`` of this process, made once."""


@dataclass(frozen=True)
class Side:
    """Some processes that train together.

    Args:
        ranks: how many they are.
        train: runs all of them until they end; called in a thread.
    """

    ranks: int
    train: Callable[[], Any]


def measure(
    address: str, sides: Mapping[str, Side], *, warm_up: int, epochs: int
) -> dict[str, list[float]]:
    """Train every side and measure its epochs.

    Args:
        address: path of a socket to create.
        sides: by name.
        warm_up: epochs that are not measured.
        epochs: epochs that are measured.

    Returns:
        Seconds of each epoch, by side.
    """
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(address)
        server.listen()
        server.settimeout(PATIENCE_S)
        pool = stack.enter_context(ThreadPoolExecutor(len(sides)))
        running = [pool.submit(side.train) for side in sides.values()]
        members: dict[str, list[socket.socket]] = {side: [] for side in sides}
        for _ in range(sum(side.ranks for side in sides.values())):
            member = stack.enter_context(server.accept()[0])
            member.settimeout(PATIENCE_S)
            members[member.recv(100).decode()].append(member)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for epoch in range(warm_up + epochs):
            # The order alternates, in case it matters.
            for side in list(sides)[:: 1 if epoch % 2 else -1]:
                elapsed = _train_epoch(members[side])
                if epoch >= warm_up:
                    seconds[side].append(elapsed)
        for training in running:
            training.result(PATIENCE_S)
    return seconds


def _train_epoch(members: list[socket.socket]) -> float:
    start = time.perf_counter()
    for member in members:
        member.sendall(_GO)
    for member in members:
        if member.recv(1) != _DONE:
            raise EOFError("a rank ended in the middle of an epoch")
    return time.perf_counter() - start
