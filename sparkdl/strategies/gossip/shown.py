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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparkdl.averager.values.finite import count_non_finite
from sparkdl.averager.values.packing import Chunk
from sparkdl.errors import TrainingError
from sparkdl.transport.connection import Connection

MODES = ("push", "pull", "push_pull")
STRETCH = 1 << 18
"""Values mixed at a time."""


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
        self._pushed: Counter[Chunk] = Counter()
        self._lock = threading.Lock()
        self._stretches = [
            Chunk(index, start, min(start + STRETCH, len(each)))
            for index, each in enumerate(values)
            for start in range(0, len(each), STRETCH)
        ]

    @property
    def size(self) -> int:
        """How many values there are."""
        return sum(map(len, self.values))

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
        connection.send_header({"gossip": mode, "epoch": self.epoch, "values": self.size})
        answer = connection.receive_header()
        if "go" not in answer:
            if "away" not in answer:
                raise TrainingError(f"a visit was answered with {reprlib.repr(answer)}")
            return False
        for stretch in self._stretches:
            if mode != "pull":
                connection.send_values(self._copy(stretch))
            if mode != "push":
                came = self._receive(connection, stretch)
                with self._lock:
                    shown = stretch.of(self.values)
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
        mode, epoch, size = (asked.get(name) for name in ("gossip", "epoch", "values"))
        if mode not in MODES or type(epoch) is not int or size != self.size:
            raise TrainingError(
                f"expected a visit to {self.size} values, got {reprlib.repr(asked)}"
            )
        if epoch != self.epoch:
            connection.send_header({"away": True})
            return
        connection.send_header({"go": True})
        for stretch in self._stretches:
            if mode == "pull":
                connection.send_values(self._copy(stretch))
                continue
            came = self._receive(connection, stretch)
            moved = self._meet(stretch, came, epoch, share=mode == "push")
            if mode == "push_pull":
                connection.send_values(moved)
        if mode == "push":
            connection.send_header({"taken": True})

    def _meet(self, stretch: Chunk, came: Tensor, epoch: int, *, share: bool) -> Tensor:
        """Mix a stretch with a visitor's; returns how much this worker's has moved."""
        with self._lock:
            shown = stretch.of(self.values)
            came.sub_(shown)
            if self.epoch != epoch:  # it has ended meanwhile
                return came.zero_()
            self._pushed[stretch] += share
            came.div_(1 + self._pushed[stretch] if share else 2)
            shown.add_(came)
            return came

    def _copy(self, stretch: Chunk) -> Tensor:
        with self._lock:
            return stretch.of(self.values).clone()

    def _receive(self, connection: Connection, stretch: Chunk) -> Tensor:
        room = torch.empty_like(stretch.of(self.values))
        connection.receive_values(room)
        if bad := count_non_finite(room):
            raise TrainingError(f"a visit brought {bad} NaN or infinite values")
        return room
