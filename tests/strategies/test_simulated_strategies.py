"""What strategies have the driver do, under schedules of losses, silence, pauses and delays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from every_row import every
from oracles import ORACLES, Simulated, mean, momentum, scaled
from own_asynchronous import EachForItself
from own_outer_momentum import OuterMomentum

from sparkdl.strategies import ASP
from sparkdl.testing.simulation import Outcome, Violation

pytestmark = pytest.mark.usefixtures("quiet")

SIMULATED = {
    **ORACLES,
    "outer momentum of one's own": Simulated(
        OuterMomentum(1, 0.5, 0.7), partial(momentum, mean, nesterov=False)
    ),
    "asynchronous of one's own": Simulated(
        EachForItself(1, 0.8), partial(scaled, 0.8, by_staleness=True)
    ),
}


def outcomes(simulated: Simulated, schedules: int) -> list[Outcome]:
    return [simulated.run(seed) for seed in range(schedules)]


@every("name", SIMULATED)
def test_every_schedule_ends_with_the_center_that_its_commits_give(name: str) -> None:
    ended = outcomes(SIMULATED[name], 25)
    assert sum(outcome.failure is None for outcome in ended) > 15
    assert sum(outcome.losses for outcome in ended) > 5


@pytest.mark.nightly
@pytest.mark.parametrize("name", ORACLES)
def test_ten_thousand_schedules_of_each_strategy_end_so(name: str) -> None:
    assert len(outcomes(ORACLES[name], 10_000)) == 10_000


@every(
    ("changes", "error", "words"),
    [
        ({"oracle": partial(scaled, 0.8, by_staleness=True)}, AssertionError, "and the oracle's"),
        ({"oracle": partial(scaled, 0.7, by_staleness=False)}, AssertionError, "and the oracle's"),
        ({"most_ahead": 2}, Violation, r"continues after \d windows, but the slowest has \d"),
    ],
)
def test_what_does_not_hold_is_found(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    wrong = replace(ORACLES[f"AsynchronousSGD, {ASP.__name__}"], **changes)
    with pytest.raises(error, match=words):
        outcomes(wrong, 70)
