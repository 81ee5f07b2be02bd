"""What a worker tells the driver of where its time goes, and when."""

from __future__ import annotations

import time
from typing import Any

from sparkdl.averager.client.worker_channel import WorkerChannel
from sparkdl.averager.messages.headers import phases_header
from sparkdl.phases import PhaseClock

TELLING_S = 0.25
"""Seconds between two reports in the middle of an epoch: to write, read and add one up takes half a
millisecond, which is nothing a window and too much a step."""
COMPARISONS = 4
"""How often the clocks are compared when a worker joins; the fastest answer counts."""


class TimeReports:
    """The times of one worker, as far as the driver has not been told of them.

    Args:
        clock: counts them; None if the driver is told nothing.

    Attributes:
        clock: as given, or one that counts for nobody.
    """

    def __init__(self, clock: PhaseClock | None) -> None:
        self.clock = PhaseClock() if clock is None else clock
        self._tells = clock is not None

    @property
    def due(self) -> bool:
        """Whether it is time for a report in the middle of an epoch."""
        return self.clock.untold_s >= TELLING_S

    def header(self) -> dict[str, Any]:
        """Fields for a header that is sent next; none if nobody counts."""
        return phases_header(self.clock.take()) if self._tells else {}

    def compare_clocks(self, channel: WorkerChannel) -> None:
        """Learn what the driver's clock says when this process's says something."""
        if not self._tells:
            return
        self.clock.forget_comparison()
        for _ in range(COMPARISONS):
            asked = time.monotonic()
            channel.send_header({"clock": True})
            theirs = float(channel.receive_header()["clock"])
            self.clock.compare(asked, theirs, time.monotonic())
