"""Epochs of trainings that have not been run: who waits for what, with whatever strategy.

Not more than some hundred thousand contributions are simulated. An epoch with more is as long as
its first windows let expect.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.planner.array_rounds import array_rounds
from sparkdl.planner.cluster import Cluster, Outcome
from sparkdl.planner.driver_run import DriverRun
from sparkdl.planner.exchanges import Exchange

MOST_DECISIONS = 300_000
"""The most contributions that the averager decides on, each of which takes 70 microseconds."""
MOST_ROUNDS = 20_000
"""The most rounds that are computed for all workers at once."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """An epoch with one strategy.

    Attributes:
        strategy: its name.
        seconds: how long the epoch takes.
        computing: the part of the workers' time in which they compute.
        waiting: in which they wait for each other, or for the driver.
        exchanging: in which they send and receive.
        rounds: exchanges of each worker.
        busiest_bytes: that pass the busiest link in its busier direction.
        driver_bytes: that the driver sends and receives.
        mean_staleness: how often others had moved the center since a contribution began.
        max_staleness: the most of that.
        losses: workers that are lost.
        part: how much of the epoch was simulated; the rest is taken to be the same.
        outcome: of that part.
    """

    strategy: str
    seconds: float
    computing: float
    waiting: float
    exchanging: float
    rounds: int
    busiest_bytes: float
    driver_bytes: float
    mean_staleness: float
    max_staleness: int
    losses: int
    part: float
    outcome: Outcome


def simulate_epoch(exchange: Exchange, cluster: Cluster, steps: int) -> Simulated:
    """Simulate an epoch.

    Args:
        exchange: what is exchanged.
        cluster: who trains.
        steps: optimizer steps of each worker.
    """
    windows = exchange.windows(steps)
    in_arrays = exchange.way != "driver" or (exchange.in_step and cluster.losses is None)
    most = MOST_ROUNDS if in_arrays else max(1, MOST_DECISIONS // cluster.workers)
    some = windows[:most]
    if in_arrays:
        outcome = array_rounds(exchange, cluster, some)
    else:
        outcome = DriverRun(exchange, cluster, some).train()
    part = sum(some) / steps
    worked = outcome.computed + outcome.waited + outcome.exchanged
    return Simulated(
        strategy=exchange.name,
        seconds=outcome.seconds / part,
        computing=outcome.computed / worked,
        waiting=outcome.waited / worked,
        exchanging=outcome.exchanged / worked,
        rounds=len(windows),
        busiest_bytes=outcome.sent / part,
        driver_bytes=outcome.driver / part,
        mean_staleness=outcome.staleness / max(outcome.windows, 1),
        max_staleness=outcome.most_stale,
        losses=round(len(outcome.lost) / part),
        part=part,
        outcome=outcome,
    )
