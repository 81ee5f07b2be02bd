"""What a worker tells of its time: all that was counted, once, and nothing if nobody counts."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.averager.client.time_reports import COMPARISONS, TimeReports
from sparkdl.averager.messages.headers import read_phases
from sparkdl.phases import COMPUTE, PHASES, PhaseClock, PhaseTimes
from sparkdl.transport.connection import Connection


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
    reports.compare_clocks(cast(Connection, driver))
    assert (reports.header(), driver.asked) == ({}, 0)


def test_what_was_counted_is_told_once() -> None:
    clock = PhaseClock()
    reports, driver = TimeReports(clock), Driver()
    reports.compare_clocks(cast(Connection, driver))
    assert driver.asked == COMPARISONS
    clock.sent = 5
    with clock.phase(COMPUTE):
        pass
    assert reports.header()["phases"]["sent"] == 5
    assert reports.header()["phases"]["sent"] == 0


seconds = st.floats(0, 1e9)


@given(st.tuples(*[seconds] * len(PHASES)), st.floats(-1e9, 1e9), seconds, st.integers(0, 1 << 60))
def test_times_arrive_as_they_were_sent(
    by_phase: tuple[float, ...], began: float, length: float, octets: int
) -> None:
    times = PhaseTimes(began, began + length, by_phase, octets, octets // 2, length)
    assert read_phases(json.loads(json.dumps({"phases": asdict(times)})), 0) == times
