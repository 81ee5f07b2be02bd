"""What each strategy's rounds make of a center of one number, once more and in plain Python.

``ORACLES`` has those whose rounds are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from sparkdl.testing.simulation import Oracle, Outcome, random_plan, simulate_strategy

Values = Mapping[int, float]
"""By rank."""


@dataclass(frozen=True)
class Simulated:
    """A strategy whose rounds are run in virtual time.

    Attributes:
        strategy: of windows of a step each.
        oracle: makes one for a run.
        most_ahead: windows by which nobody may begin another ahead of the slowest; None for any.
    """

    strategy: Strategy[Any]
    oracle: Callable[[], Oracle]
    most_ahead: int | None = None

    def run(self, seed: int) -> Outcome:
        """One schedule; every second one of longer epochs, in which workers come apart."""
        plan = random_plan(seed, times=1 + seed % 2)
        return simulate_strategy(self.strategy, plan, self.oracle(), most_ahead=self.most_ahead)


def weighted(contributions: Contributions, terms: list[float]) -> float:
    """Their mean by rows."""
    pairs = zip(contributions.weights, terms, strict=True)
    return sum(weight * term for weight, term in pairs) / sum(contributions.weights)


def mean(center: float, contributions: Contributions, values: Values, begun: Values) -> float:
    """Parameter averaging, and the end of an epoch of gossip."""
    return weighted(contributions, list(values.values()))


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


def behind(barrier: Barrier, most_ahead: int | None = None) -> Simulated:
    """Asynchronous SGD with a barrier."""
    return Simulated(
        AsynchronousSGD(1, 0.8, barrier=barrier),
        partial(scaled, 0.8, by_staleness=False),
        most_ahead,
    )


HEAVY_BALL, NESTEROV = OuterSGD(0.7, 0.5, nesterov=False), OuterSGD(0.7, 0.5)
ORACLES = {
    "AsynchronousSGD, ASP": behind(ASP()),
    "AsynchronousSGD, ASP, by staleness": Simulated(
        AsynchronousSGD(1, 0.8, scale_by_staleness=True), partial(scaled, 0.8, by_staleness=True)
    ),
    "AsynchronousSGD, BSP": behind(BSP()),
    "AsynchronousSGD, SSP(0)": behind(SSP(0), 0),
    "AsynchronousSGD, SSP(1)": behind(SSP(1), 1),
    "AsynchronousSGD, SSP(3)": behind(SSP(3), 3),
    "AsynchronousSGD, PBSP(1)": behind(PBSP(1)),
    "AsynchronousSGD, PBSP(everyone)": behind(PBSP(99), 0),
    "AsynchronousSGD, PSSP(1, 1)": behind(PSSP(1, 1)),
    "AsynchronousSGD, PSSP(everyone, 2)": behind(PSSP(99, 2), 2),
    "AsynchronousSGD, Softsync(1)": behind(Softsync(1)),
    "AsynchronousSGD, Softsync(2)": behind(Softsync(2)),
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
