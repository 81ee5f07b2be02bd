"""What a worker tells the driver about where its time goes, and when."""

from __future__ import annotations

import time
from typing import Any

from sparkdl.averager.client.worker_channel import WorkerChannel
from sparkdl.averager.messages.headers import phases_header
from sparkdl.phases import PhaseClock

TELLING_S = 0.25
"""Seconds between two reports within an epoch: to write, read and add up one takes half a
millisecond, which is nothing per window and too much per step."""
COMPARISONS = 4
"""How often the clocks are compared when a worker joins; the fastest answer counts."""


class TimeReports:
    """The times of one worker that have not been reported to the driver.

    Args:
        clock: counts them; None if the driver is told nothing.

    Attributes:
        clock: as given, or one whose counts nobody reads.
    """

    def __init__(self, clock: PhaseClock | None) -> None:
        self.clock = PhaseClock() if clock is None else clock
        self._tells = clock is not None

    @property
    def due(self) -> bool:
        """Whether it is time for a report within an epoch."""
        return self.clock.untold_s >= TELLING_S

    def header(self) -> dict[str, Any]:
        """Fields for the next header; empty if nothing is counted."""
        return phases_header(self.clock.take()) if self._tells else {}

    def compare_clocks(self, channel: WorkerChannel) -> None:
        """Find the offset between the driver's clock and this process's."""
        if not self._tells:
            return
        self.clock.forget_comparison()
        for _ in range(COMPARISONS):
            asked = time.monotonic()
            channel.send_header({"clock": True})
            theirs = float(channel.receive_header()["clock"])
            self.clock.compare(asked, theirs, time.monotonic())
