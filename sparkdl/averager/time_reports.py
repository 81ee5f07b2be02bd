"""What a worker tells the driver about where its time goes."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from sparkdl.phases import PhaseClock
from sparkdl.transport.connection import Connection

TELLING_S = 0.25
"""Seconds between reports in the middle of an epoch: writing, reading and adding up one takes half
a millisecond, which is nothing per window and too much per step."""
COMPARISONS = 4
"""How often the clocks are compared when a worker joins; the fastest answer counts."""


class TimeReports:
    """One worker's times that have not been reported to the driver yet.

    Args:
        clock: counts them; None for no reports.

    Attributes:
        clock: as given, or one that nobody reads.
    """

    def __init__(self, clock: PhaseClock | None) -> None:
        self.clock = PhaseClock() if clock is None else clock
        self._tells = clock is not None

    @property
    def due(self) -> bool:
        """Whether it is time for a report in the middle of an epoch."""
        return self.clock.untold_s >= TELLING_S

    def header(self) -> dict[str, Any]:
        """Fields for the next header to be sent; none if nothing is reported."""
        return {"phases": asdict(self.clock.take())} if self._tells else {}

    def compare_clocks(self, connection: Connection) -> None:
        """Compare the driver's clock with this process's."""
        if not self._tells:
            return
        self.clock.forget_comparison()
        for _ in range(COMPARISONS):
            asked = time.monotonic()
            connection.send_header({"clock": True})
            theirs = float(connection.receive_header()["clock"])
            self.clock.compare(asked, theirs, time.monotonic())
