"""The values that a worker shows in gossip, and how two workers mix.

Let s be what a worker shows. A call on another goes stretch by stretch:

    pull        s_mine  <-  (s_mine + s_other) / 2
    push        s_other <-  its mean with all that were pushed to it since it last mixed itself
    push_pull   d <- (s_mine - s_other) / 2       s_other <- s_other + d       s_mine <- s_mine - d

on a connection with these messages:

    visitor                                   host
    {"gossip": mode, "epoch": its,
     "values": how many}             ------>
                                     <------  {"go": true}, or {"away": true}: another epoch
    values                           ------>  of each stretch, except to pull
                                     <------  values of each stretch: what it shows for a pull, d
                                              for a push and pull
                                     <------  {"taken": true} after a push

A worker trains on meanwhile. When it mixes next, it adds to s what it has learned since the last
time, and then goes on from s; so nothing of either is lost.
"""

from __future__ import annotations

import reprlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkdl.averager.values.replica_codec import count_non_finite
from sparkdl.errors import TrainingError
from sparkdl.transport.connection import Connection

MODES = ("push", "pull", "push_pull")
STRETCH = 1 << 18
"""Values mixed at a time."""


def stretches_of(values: Sequence[Tensor]) -> list[Tensor]:
    """Views of values, of as many as are sent at a time."""
    return [part for each in values for part in torch.split(each, STRETCH) if len(part)]


def ask(
    connection: Connection, asked: dict[str, Any], waits: Callable[[], bool] = lambda: False
) -> bool:
    """Begin a visit.

    Args:
        connection: to another worker.
        asked: the header.
        waits: called while the other is not there yet; whether to ask again.

    Returns:
        Whether it goes ahead.

    Raises:
        TrainingError: what came is not what workers of this training send.
    """
    connection.send_header(asked)
    while "go" not in (answer := connection.receive_header()):
        if not answer.keys() & {"wait", "away", "past"}:
            raise TrainingError(f"a visit was answered with {reprlib.repr(answer)}")
        # A worker that has yet to start counts as away.
        if "past" in answer or not waits():
            return False
        connection.send_header(asked)
    return True


def asked_for(asked: dict[str, Any], modes: Sequence[str], size: int, *names: str) -> list[Any]:
    """The mode of a visit, and the numbers of these names.

    Raises:
        TrainingError: no worker of this training begins a visit like that.
    """
    mode, *numbers = (asked.get(name) for name in ("gossip", *names))
    whole = all(type(each) is int for each in numbers)
    if mode not in modes or asked.get("values") != size or not whole:
        raise TrainingError(f"expected a visit to {size} values, got {reprlib.repr(asked)}")
    return [mode, *numbers]


def receive(connection: Connection, room: Tensor) -> Tensor:
    """Receive a stretch into a tensor, and return it.

    Raises:
        TrainingError: it is not finite.
    """
    connection.receive_values(room)
    if bad := count_non_finite(room):
        raise TrainingError(f"a visit brought {bad} NaN or infinite values")
    return room


class Shown:
    """What one worker shows to the others.

    Args:
        values: float32 or float64 tensors, 1-D, on the CPU; copied.

    Attributes:
        values: s.
        epoch: the one that the worker is in; None while it must not be visited.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self.values = [each.clone() for each in values]
        self.epoch: int | None = None
        # What the worker had when it last mixed; between publishing and adopting, what it learned.
        self._before = [each.clone() for each in values]
        self._pushed: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._stretches = stretches_of(self.values)
        self._size = sum(map(len, values))

    # What the worker itself does.

    def open(self, epoch: int, mine: Sequence[Tensor]) -> None:
        """Begin an epoch, with the values that all begin it with."""
        with self._lock:
            for shown, before, values in zip(self.values, self._before, mine, strict=True):
                shown.copy_(values)
                before.copy_(values)
            self._pushed.clear()
            self.epoch = epoch

    def publish(self, mine: Sequence[Tensor], *, last: bool = False) -> None:
        """Show what the worker has learned since it last mixed; ``adopt`` must follow.

        Args:
            mine: what it has now, of the same sizes, on any device.
            last: whether nobody may visit it from now on.
        """
        with self._lock:
            for shown, before, values in zip(self.values, self._before, mine, strict=True):
                # In this order, because the two are close, so that the difference is exact.
                torch.sub(values.detach().to("cpu", shown.dtype), before, out=before)
                shown.add_(before)
            self._pushed.clear()
            if last:
                self.epoch = None

    def adopt(self, mine: Sequence[Tensor]) -> None:
        """Have the worker go on from what it shows."""
        with self._lock:
            for shown, before, values in zip(self.values, self._before, mine, strict=True):
                values.copy_(shown)
                # What half precision rounds away is not learned; it stays in what is shown.
                before.copy_(values)

    # The two ends of a visit.

    def visit(self, connection: Connection, mode: str) -> bool:
        """Mix with another worker, or have it mix.

        Args:
            connection: to it.
            mode: one of ``MODES``.

        Returns:
            Whether it was there, and in the same epoch.

        Raises:
            TrainingError: what came is not what workers of this training send.
        """
        if not ask(connection, {"gossip": mode, "epoch": self.epoch, "values": self._size}):
            return False
        for shown in self._stretches:
            if mode != "pull":
                connection.send_values(self._copy(shown))
            if mode != "push":
                came = receive(connection, torch.empty_like(shown))
                with self._lock:
                    if mode == "pull":
                        shown.add_(came).mul_(0.5)
                    else:
                        shown.sub_(came)
        if mode == "push":
            connection.receive_header()
        return True

    def host(self, connection: Connection, asked: dict[str, Any]) -> None:
        """Serve a visit.

        Args:
            connection: from another worker.
            asked: the header that it began with.

        Raises:
            TrainingError: the other end sends what no worker of this training sends.
        """
        mode, epoch = asked_for(asked, MODES, self._size, "epoch")
        if epoch != self.epoch:
            connection.send_header({"away": True})
            return
        connection.send_header({"go": True})
        for number, shown in enumerate(self._stretches):
            if mode == "pull":
                connection.send_values(self._copy(shown))
                continue
            came = receive(connection, torch.empty_like(shown))
            moved = self._meet(number, came, epoch, share=mode == "push")
            if mode == "push_pull":
                connection.send_values(moved)
        if mode == "push":
            connection.send_header({"taken": True})

    def _meet(self, number: int, came: Tensor, epoch: int, *, share: bool) -> Tensor:
        """Mix a stretch with a visitor's; returns how much this worker's has moved."""
        shown = self._stretches[number]
        with self._lock:
            came.sub_(shown)
            if self.epoch != epoch:  # it has ended meanwhile
                return came.zero_()
            self._pushed[number] += share
            came.div_(1 + self._pushed[number] if share else 2)
            shown.add_(came)
            return came

    def _copy(self, shown: Tensor) -> Tensor:
        with self._lock:
            return shown.clone()
