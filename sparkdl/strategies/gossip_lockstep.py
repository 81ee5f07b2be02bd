"""What a worker shows at each iteration, for gossip where neighbours mix at the same time.

A worker at iteration t of an epoch asks its neighbours for what they had at iteration t, on a
connection with these messages:

    visitor                                   host
    {"gossip": "symmetric", "epoch": its,
     "iteration": its,
     "values": how many}             ------>
                                     <------  {"go": true}, and values of each stretch
                                     <------  or {"wait": true}: not there yet; ask again
                                     <------  or {"past": true}: will not be there, or has been

Of two workers that are neighbours in each iteration, neither is more than one iteration ahead, so a
worker keeps what it had at its last two. Of two that are neighbours only now and then, one may be
further ahead, since others hold it back only iterations later: it does not go on until those with
whom it has mixed have its values too. A worker that was lost and starts its epoch over is further
behind than that: it finds its iterations past, as do those who ask for them, and trains alone until
the epoch ends.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkdl.strategies.gossip_values import ask, asked_for, receive, stretches_of
from sparkdl.transport.connection import Connection

SAID_EVERY_S = 1.0
"""Seconds after which a visitor is told to keep waiting: far fewer than its patience."""


def neighbors_of(
    topology: str, rank: int, world_size: int, epoch: int, iteration: int
) -> list[int]:
    """The ranks that a worker mixes with in an iteration; the relation is symmetric.

    Args:
        topology: ``ring`` for the two next to it, ``exponential`` for all that are 1, 2, 4, ...
            ranks away on either side, ``random`` for two, on a ring redrawn in each iteration.
        rank: of the worker.
        world_size: how many there are.
        epoch: counted from 1.
        iteration: mixings of the epoch before this one.

    Returns:
        Other ranks, in ascending order; every rank has equally many.
    """
    hops, places = [1], list(range(world_size))
    if topology == "exponential":
        hops = [1 << power for power in range((world_size - 1).bit_length())]
    elif topology == "random":
        random.Random(f"{epoch} {iteration}").shuffle(places)
    place = places.index(rank)
    met = {places[(place + way * hop) % world_size] for hop in hops for way in (-1, 1)}
    return sorted(met - {rank})


def lead_of(topology: str, world_size: int) -> int:
    """How many iterations a worker may be ahead of one that it asks, if none is lost.

    A worker that stands still holds back its neighbours, an iteration later theirs, and so on: on a
    ring redrawn in each iteration, at least two more each time.

    Args:
        topology: as for ``neighbors_of``.
        world_size: how many workers there are.
    """
    return max(1, world_size // 2) if topology == "random" else 1


class Snapshots:
    """What one worker had at its last two iterations.

    Args:
        values: float32 or float64 tensors, 1-D, on the CPU, with the sizes and types to show.

    Attributes:
        size: how many values there are.
        room: like ``values``, for those of another worker.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self.size = sum(map(len, values))
        self.room = [torch.empty_like(each) for each in values]
        self._kept: dict[int, list[Tensor]] = {}
        self._epoch: int | None = None
        self._iteration = -1
        self._lead = 1
        self._ended = False
        # By iteration: neighbours that were visited, and so come for the same one; and visits
        # served.
        self._expected: Counter[int] = Counter()
        self._served: Counter[int] = Counter()
        self._changed = threading.Condition()

    def open(self, epoch: int, lead: int = 1) -> None:
        """Begin an epoch, in which others may be ``lead`` iterations ahead and have to wait."""
        with self._changed:
            self._kept.clear()
            self._epoch, self._iteration, self._ended = epoch, -1, False
            self._lead = lead
            self._expected.clear()
            self._served.clear()
            self._changed.notify_all()

    def await_visits(self, iteration: int, waits: Callable[[], bool]) -> None:
        """Wait until neighbours have fetched what publishing an iteration drops.

        Args:
            iteration: the one to be published.
            waits: called now and then; whether to keep waiting.
        """
        old = iteration - 2
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_fetched(old), timeout=SAID_EVERY_S):
                    return
            if not waits():
                return

    def publish(self, iteration: int, mine: Sequence[Tensor]) -> list[Tensor]:
        """Show what the worker has at an iteration; returns the same values in shown form."""
        # New tensors, as visitors may still be sent those of two iterations ago.
        shown = [
            values.detach().to("cpu", room.dtype, copy=True)
            for values, room in zip(mine, self.room, strict=True)
        ]
        with self._changed:
            self._kept = {i: kept for i, kept in self._kept.items() if i >= iteration - 1}
            self._kept[iteration], self._iteration = shown, iteration
            self._changed.notify_all()
            return shown

    def end(self) -> None:
        """Have no more iterations in this epoch; neighbours may still ask for the last."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # The two ends of a visit.

    def visit(
        self, connection: Connection, epoch: int, iteration: int, waits: Callable[[], bool]
    ) -> bool:
        """Fetch what a neighbour had at an iteration, into ``room``.

        Args:
            connection: to it.
            epoch: of the visitor.
            iteration: of the visitor.
            waits: called while the neighbour is not there yet; whether to keep waiting.

        Returns:
            Whether it had such an iteration.

        Raises:
            TrainingError: what came is not what workers of this training send.
        """
        asked = {"gossip": "symmetric", "epoch": epoch, "iteration": iteration, "values": self.size}
        if not ask(connection, asked, waits):
            return False
        for part in stretches_of(self.room):
            receive(connection, part)
        self._expected[iteration] += 1
        return True

    def host(self, connection: Connection, asked: dict[str, Any]) -> None:
        """Serve a visit.

        Args:
            connection: from another worker.
            asked: the header that it began with.

        Raises:
            TrainingError: the other end sends what no worker of this training sends.
        """
        names = ("epoch", "iteration")
        _, epoch, iteration = asked_for(asked, ["symmetric"], self.size, *names)
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_to_come(epoch, iteration), timeout=SAID_EVERY_S
            )
            waits = self._is_to_come(epoch, iteration)
            shown = self._kept.get(iteration) if epoch == self._epoch else None
        if shown is None:
            connection.send_header({"wait": True} if waits else {"past": True})
            return
        connection.send_header({"go": True})
        for part in stretches_of(shown):
            connection.send_values(part)
        with self._changed:
            if epoch == self._epoch:
                self._served[iteration] += 1
                self._changed.notify_all()

    def _is_fetched(self, iteration: int) -> bool:
        return self._served[iteration] >= self._expected[iteration]

    def _is_to_come(self, epoch: int, iteration: int) -> bool:
        if self._epoch is None or (self._ended and epoch == self._epoch + 1):
            return True
        ahead = iteration - self._iteration
        return epoch == self._epoch and 0 < ahead <= self._lead and not self._ended
