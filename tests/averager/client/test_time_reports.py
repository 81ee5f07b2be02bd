"""What a worker tells of its time: all that was counted, once, and nothing if nobody counts."""

from __future__ import annotations

from typing import Any, cast

from sparkdl.averager.client.worker_channel import COMPARISONS, TimeReports, WorkerChannel
from sparkdl.phases import COMPUTE, PhaseClock


class Driver:
    """Answers with a clock that is an hour ahead of none in particular."""

    asked = 0

    def send_header(self, fields: dict[str, Any]) -> None:
        assert fields == {"clock": True}
        self.asked += 1

    def receive_header(self) -> dict[str, Any]:
        return {"clock": 3600.0}


def test_nothing_is_told_where_nobody_counts() -> None:
    reports, driver = TimeReports(None), Driver()
    reports.compare_clocks(cast(WorkerChannel, driver))
    assert (reports.header(), driver.asked) == ({}, 0)


def test_what_was_counted_is_told_once() -> None:
    clock = PhaseClock()
    reports, driver = TimeReports(clock), Driver()
    reports.compare_clocks(cast(WorkerChannel, driver))
    assert driver.asked == COMPARISONS
    clock.sent = 5
    with clock.phase(COMPUTE):
        pass
    assert reports.header()["phases"]["sent"] == 5
    assert reports.header()["phases"]["sent"] == 0
