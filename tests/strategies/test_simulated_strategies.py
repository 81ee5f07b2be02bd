"""What strategies have the driver do, under schedules of losses, silence, pauses and delays.

``ORACLES`` has what their rounds make of a center of one number, in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from by_hand import recorded_decisions
from decided import do
from every_row import every, every_row
from own_asynchronous import EachForItself
from own_outer_momentum import OuterMomentum
from support.simulation.plan import random_plan
from support.simulation.run import (
    Oracle,
    Outcome,
    Values,
    Violation,
    mean,
    simulate_strategy,
    weighted,
)

from sparkdl.events import WindowReport
from sparkdl.strategies import (
    ASP,
    BSP,
    PBSP,
    PSSP,
    SSP,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    Barrier,
    Contributions,
    DelayedNesterov,
    ElasticAveraging,
    GossipAveraging,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    Softsync,
    Strategy,
    ThresholdGradientSharing,
)


@dataclass(frozen=True)
class Simulated:
    """A strategy whose rounds are run in virtual time.

    Attributes:
        strategy: of windows of a step each.
        oracle: makes one for a run.
        most_ahead: windows by which nobody may begin another ahead of the slowest; None for any.
        ahead: the least and the most by which somebody does in 20 schedules of longer epochs; None
            if this is left open.
    """

    strategy: Strategy[Any]
    oracle: Callable[[], Oracle]
    most_ahead: int | None = None
    ahead: tuple[int, int] | None = None

    def run(self, seed: int) -> Outcome:
        """One schedule; every second one of longer epochs, in which workers come apart."""
        plan = random_plan(seed, times=2 if self.ahead else 1 + seed % 2)
        return simulate_strategy(self.strategy, plan, self.oracle(), most_ahead=self.most_ahead)


def mean_of_sent(
    center: float, contributions: Contributions, values: Values, begun: Values
) -> float:
    """Gradient sharing: what workers send are changes, here whatever number they have."""
    return center + mean(center, contributions, values, begun)


def mean_change(
    center: float, contributions: Contributions, values: Values, begun: Values
) -> float:
    """Rounds with a cut-off: each counts from the center that it began with, by its share."""
    changes = [value - begun[rank] for rank, value in values.items()]
    return center + contributions.share * weighted(contributions, changes)


def scaled(rate: float, *, by_staleness: bool) -> Oracle:
    """Asynchronous SGD: of the mean change, in which stale ones may count less, a part."""
    centers: list[float] = []

    def move(center: float, contributions: Contributions, values: Values, begun: Values) -> float:
        if center not in centers:
            centers.append(center)
        stale = {rank: len(centers) - 1 - centers.index(begun[rank]) for rank in values}
        assert contributions.staleness == max(stale.values())
        moved = [
            (value - begun[rank]) / (1 + stale[rank] * by_staleness)
            for rank, value in values.items()
        ]
        part = rate if by_staleness else rate * contributions.share
        return center + part * weighted(contributions, moved)

    return move


def delayed_nesterov() -> Oracle:
    """Asynchronous DiLoCo of three workers, with a rate of 0.7 and a momentum of 0.5."""
    velocity = gathered = 0.0

    def move(center: float, contributions: Contributions, values: Values, begun: Values) -> float:
        nonlocal velocity, gathered
        change = sum(value - begun[rank] for rank, value in values.items()) / 3
        gathered += change
        if contributions.round % 3:
            return center + 0.7 * change
        velocity = 0.5 * velocity + gathered
        gathered = 0.0
        return center + 0.7 * (change + 0.5 * velocity)

    return move


def pulled(rate: float) -> Oracle:
    """Elastic averaging; simulated workers have weights, which the mean has."""

    def move(center: float, contributions: Contributions, values: Values, begun: Values) -> float:
        distance = mean(center, contributions, values, begun) - center
        return center + rate * len(values) * distance

    return move


def pulled_to_read(rate: float) -> Oracle:
    """Hogwild: each pulls to the center that it was sent, others' updates being between."""

    def move(center: float, contributions: Contributions, values: Values, begun: Values) -> float:
        ((rank, value),) = values.items()
        return center + rate * (value - begun[rank])

    return move


def momentum(change: Oracle, *, nesterov: bool) -> Oracle:
    """An outer step with a rate of 0.7 and a momentum of 0.5 to where ``change`` says."""
    velocity = 0.0

    def move(center: float, contributions: Contributions, values: Values, begun: Values) -> float:
        nonlocal velocity
        moved = change(center, contributions, values, begun) - center
        velocity = 0.5 * velocity + moved
        return center + 0.7 * (moved + 0.5 * velocity if nesterov else velocity)

    return move


def fragments() -> Oracle:
    """Nesterov's momentum of several numbers, one a round, which are told apart by their values."""
    velocities: list[tuple[float, float]] = []

    def move(center: float, contributions: Contributions, values: Values, begun: Values) -> float:
        known = [pair for pair in velocities if math.isclose(pair[0], center, rel_tol=1e-12)]
        velocity = known[-1][1] if known else 0.0
        change = mean(center, contributions, values, begun) - center
        velocity = 0.5 * velocity + change
        moved = center + 0.7 * (change + 0.5 * velocity)
        velocities.append((moved, velocity))
        return moved

    return move


def behind(barrier: Barrier, least: int | None = None, most: int | None = None) -> Simulated:
    """Asynchronous SGD with a barrier, and what somebody is ahead by: exactly that or up to it."""
    bound = None if most else least
    return Simulated(
        AsynchronousSGD(1, 0.8, barrier=barrier),
        partial(scaled, 0.8, by_staleness=False),
        bound,
        None if least is None else (least, most or least),
    )


HEAVY_BALL, NESTEROV = OuterSGD(0.7, 0.5, nesterov=False), OuterSGD(0.7, 0.5)
ORACLES = {
    "AsynchronousSGD, ASP": behind(ASP(), 4, 6),
    "AsynchronousSGD, ASP, by staleness": Simulated(
        AsynchronousSGD(1, 0.8, scale_by_staleness=True), partial(scaled, 0.8, by_staleness=True)
    ),
    "AsynchronousSGD, BSP": behind(BSP()),
    "AsynchronousSGD, SSP(0)": behind(SSP(0), 0),
    "AsynchronousSGD, SSP(1)": behind(SSP(1), 1),
    "AsynchronousSGD, SSP(3)": behind(SSP(3), 3),
    "AsynchronousSGD, PBSP(1)": behind(PBSP(1), 1, 6),
    "AsynchronousSGD, PBSP(everyone)": behind(PBSP(99), 0),
    "AsynchronousSGD, PSSP(1, 1)": behind(PSSP(1, 1), 2, 6),
    "AsynchronousSGD, PSSP(everyone, 2)": behind(PSSP(99, 2), 2),
    "AsynchronousSGD, Softsync(1)": behind(Softsync(1)),
    "AsynchronousSGD, Softsync(2)": behind(Softsync(2), 3, 6),
    "AsynchronousSGD, Softsync(3)": behind(Softsync(3)),
    "AsynchronousOuterOptimizer": Simulated(
        AsynchronousOuterOptimizer(DelayedNesterov(3, 0.7, 0.5), 1), delayed_nesterov
    ),
    "ElasticAveraging, asynchronous": Simulated(
        ElasticAveraging(1, 0.2, mode="asynchronous"), partial(pulled, 0.2)
    ),
    "ElasticAveraging, hogwild": Simulated(
        ElasticAveraging(1, 0.2, mode="hogwild"), partial(pulled_to_read, 0.2)
    ),
    "ElasticAveraging, round_robin": Simulated(
        ElasticAveraging(1, 0.2, mode="round_robin"), partial(pulled, 0.2)
    ),
    "ElasticAveraging, synchronous": Simulated(ElasticAveraging(1, 0.2), partial(pulled, 0.2)),
    "GossipAveraging": Simulated(GossipAveraging(), lambda: mean),
    "ThresholdGradientSharing": Simulated(ThresholdGradientSharing(), lambda: mean_of_sent),
    "ParameterAveraging, cutoff=1": Simulated(ParameterAveraging(1, cutoff=1), lambda: mean_change),
    "ParameterAveraging, cutoff='predicted'": Simulated(
        ParameterAveraging(1, cutoff="predicted"), lambda: mean_change
    ),
    "OuterOptimizer, cutoff=1": Simulated(
        OuterOptimizer(1, HEAVY_BALL, cutoff=1), partial(momentum, mean_change, nesterov=False)
    ),
    "OuterOptimizer, cutoff='predicted'": Simulated(
        OuterOptimizer(1, NESTEROV, cutoff="predicted"),
        partial(momentum, mean_change, nesterov=True),
    ),
    "OuterOptimizer": Simulated(
        OuterOptimizer(1, NESTEROV), partial(momentum, mean, nesterov=True)
    ),
    "OuterOptimizer, heavy ball": Simulated(
        OuterOptimizer(1, HEAVY_BALL), partial(momentum, mean, nesterov=False)
    ),
    "OuterOptimizer, fragments=3": Simulated(OuterOptimizer(3, NESTEROV, fragments=3), fragments),
}
"""By what they are called in a table."""


ROUND_ROBIN = ElasticAveraging(1, 0.2, mode="round_robin")
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
    simulated = SIMULATED[name]
    count = 20 if simulated.ahead else 12
    ended = outcomes(simulated, count)
    assert sum(outcome.failure is None for outcome in ended) > 0.6 * count
    assert sum(outcome.losses for outcome in ended) > 0.2 * count
    least, most = simulated.ahead or (0, math.inf)
    assert least <= max(outcome.ahead for outcome in ended) <= most


@pytest.mark.nightly
@pytest.mark.parametrize("name", ORACLES)
def test_ten_thousand_schedules_of_each_strategy_end_so(name: str) -> None:
    assert len(outcomes(ORACLES[name], 10_000)) == 10_000


@every_row(
    ({"oracle": partial(scaled, 0.8, by_staleness=True)}, AssertionError, "and the oracle's"),
    ({"oracle": partial(scaled, 0.7, by_staleness=False)}, AssertionError, "and the oracle's"),
    ({"most_ahead": 2}, Violation, r"continues after \d windows, but the slowest has \d"),
)
def test_what_does_not_hold_is_found(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    wrong = replace(ORACLES[f"AsynchronousSGD, {ASP.__name__}"], **changes)
    with pytest.raises(error, match=words):
        outcomes(wrong, 70)


def laps(windows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Whose turn it is, and in which lap, until all have had so many windows."""
    for lap in range(max(windows, default=0)):
        yield from ((rank, lap) for rank in range(len(windows)) if lap < windows[rank])


def test_a_made_up_round_robin_run_without_faults_keeps_the_order() -> None:
    """Whatever messages and windows take: 15 schedules of one to four workers."""
    for seed in range(15):
        plan = replace(random_plan(seed), faults=())
        with recorded_decisions() as decisions:
            simulate_strategy(ROUND_ROBIN, plan, pulled(0.2))
        told = [each.event for each in decisions if isinstance(each, do.report)]
        windows = [event for event in told if isinstance(event, WindowReport)]
        # One without rows has a last window all the same.
        expected = [rank for rank, _ in laps([max(count, 1) for count in plan.windows])]
        for epoch in range(1, plan.epochs + 1):
            assert [each.rank for each in windows if each.epoch == epoch] == expected
