"""A round in which a worker takes part while it trains on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparkdl.averager.client.worker_channel import Entry, WorkerChannel
from sparkdl.events import WindowReport


def merge(values: Tensor, center: Tensor, local: float) -> None:
    """Merge the center's values into those that were trained while they were on their way.

    Args:
        values: of any dtype, 1-D; overwritten.
        center: of the same shape.
        local: how much of the worker's own stays, if they are floating-point numbers.
    """
    if local and values.dtype.is_floating_point:
        values.mul_(local).add_(center.to(values.device), alpha=1 - local)
    else:
        values.copy_(center)


@dataclass(frozen=True)
class Contribution:
    """What a worker sends, in memory of its own.

    Attributes:
        window: what was trained on.
        header: says so.
        kept: what the averager is to keep of the worker, in this order.
        values: after that, once the worker may contribute; none if it does not.
    """

    window: WindowReport
    header: dict[str, Any]
    kept: Sequence[Tensor]
    values: Sequence[Tensor]


class OverlappedRound:
    """Send a contribution and receive the reply, in a thread of its own.

    Args:
        channel: to the averager; nobody else may use it before ``wait`` has returned.
        contribution: what is sent.
        reply: room for what comes back, a tensor a message.
        entry: whether the worker has to wait until it may contribute; used as the channel.
        varies: whether that may be less.

    Attributes:
        window: the contribution's.
        reply: what has come back.
        notes: headers that came before the reply; to be looked at after ``wait``.
    """

    def __init__(
        self,
        channel: WorkerChannel,
        contribution: Contribution,
        reply: Sequence[Tensor],
        entry: Entry,
        *,
        varies: bool,
    ) -> None:
        self.window = contribution.window
        self.reply: list[Tensor] = []
        self._room = reply
        self._entry = entry
        self._varies = varies
        self.notes: list[dict[str, Any]] = []
        self._channel = channel
        self._contribution = contribution
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sparkdl-round", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the reply.

        Raises:
            DeadlineError: the averager has said nothing for too long.
            StoppedError: it has ended the run.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Break the channel, and see that nobody uses it any more."""
        self._channel.break_off()
        self._thread.join()

    def _run(self) -> None:
        try:
            # As often as the round starts over because another worker was lost.
            while not self._take_part():
                pass
        except BaseException as error:  # raised where the reply is wanted
            self._error = error

    def _take_part(self) -> bool:
        """Returns whether the round has ended; it starts over otherwise."""
        contribution = self._contribution
        self._channel.send_header(contribution.header)
        for octets in contribution.kept:
            self._channel.send_values(octets)
        if contribution.values:
            self._entry.wait(self._channel, self.notes.append)
        for values in contribution.values:
            self._channel.send_values(values)
        for room in self._room:
            while isinstance(came := self._channel.receive_packed(room, varies=self._varies), dict):
                if "again" in came:
                    return False
                self.notes.append(came)
            self.reply.append(came)
        return True
