"""What a worker tells of its time: read back as sent, and refused where no clock shows it."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from every_row import every
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.averager.messages.headers import phases_header, read_phases
from sparkdl.errors import TrainingError
from sparkdl.phases import PHASES, PhaseTimes

TIMES = PhaseTimes(10.0, 16.0, (1.0, 2.0, 0.5, 0.5, 1.5, 0.5), 100, 200, 0.001)
seconds = st.floats(0, 1e9)


@given(st.tuples(*[seconds] * len(PHASES)), st.floats(-1e9, 1e9), seconds, st.integers(0, 1 << 60))
def test_times_arrive_as_they_were_sent(
    by_phase: tuple[float, ...], began: float, length: float, octets: int
) -> None:
    times = PhaseTimes(began, began + length, by_phase, octets, octets // 2, length)
    assert read_phases(json.loads(json.dumps(phases_header(times))), 0) == times


def test_a_worker_need_not_tell_its_times() -> None:
    assert read_phases({"finish": True}, 0) is None


@every(
    "changes",
    [
        {"seconds": [1.0] * 5},
        {"seconds": [1.0] * 5 + [-1.0]},
        {"seconds": [1.0] * 5 + [math.nan]},
        {"seconds": [1.0] * 5 + [math.inf]},
        {"seconds": [1.0] * 5 + ["1"]},
        {"seconds": [1.0] * 5 + [True]},
        {"seconds": {}},
        {"began": math.inf},
        {"began": 17.0},
        {"ended": None},
        {"sent": -1},
        {"sent": 1.5},
        {"received": 1 << 80},
        {"uncertainty": -0.1},
        {"more": 1},
    ],
)
def test_times_that_no_clock_shows_end_the_run(changes: dict[str, Any]) -> None:
    header: dict[str, Any] = copy.deepcopy(phases_header(TIMES))
    header["phases"].update(changes)
    with pytest.raises(TrainingError, match="rank 3"):
        read_phases({"phases": header["phases"]}, 3)
    with pytest.raises(TrainingError):
        read_phases({"phases": [header]}, 3)
