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
    """Merge the center's values into those that were trained while they were in transit.

    Args:
        values: of any dtype, 1-D; overwritten.
        center: of the same shape.
        local: how much of the worker's own values to keep, if they are floating-point numbers.
    """
    if local and values.dtype.is_floating_point:
        values.mul_(local).add_(center.to(values.device), alpha=1 - local)
    else:
        values.copy_(center)


@dataclass(frozen=True)
class Contribution:
    """What a worker sends, in separate memory.

    Attributes:
        window: what was trained on.
        header: its header, which is sent first.
        kept: what the averager should keep of the worker, sent next.
        values: sent last, once the worker may contribute; empty if it does not.
    """

    window: WindowReport
    header: dict[str, Any]
    kept: Sequence[Tensor]
    values: Sequence[Tensor]


class OverlappedRound:
    """Send a contribution and receive the reply, in a separate thread.

    Args:
        channel: to the averager; not to be used elsewhere before ``wait`` has returned.
        contribution: what to send.
        reply: room for the reply, one tensor per message.
        entry: says whether the worker must wait until it may contribute; shared like the channel.
        varies: whether the reply may be shorter.

    Attributes:
        window: the contribution's.
        reply: what was received.
        notes: headers that came before the reply; to be read after ``wait``.
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
        """Break the channel, and make sure that nothing uses it any more."""
        self._channel.break_off()
        self._thread.join()

    def _run(self) -> None:
        try:
            # Repeated whenever the round starts over because another worker was lost.
            while not self._take_part():
                pass
        except BaseException as error:  # raised again where the reply is awaited
            self._error = error

    def _take_part(self) -> bool:
        """Take part once; returns whether the round has ended, else it starts over."""
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
