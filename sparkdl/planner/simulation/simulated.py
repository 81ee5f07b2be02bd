"""One epoch of a training that has not been run: who waits for whom, with whatever strategy.

Not more than some hundred thousand contributions are simulated. An epoch with more is as long as
its first windows let expect.
"""

from __future__ import annotations

from sparkdl.planner.simulation.array_rounds import array_rounds
from sparkdl.planner.simulation.cluster import Cluster, Epoch, Note
from sparkdl.planner.simulation.driver_run import DriverRun
from sparkdl.planner.simulation.exchanges import Exchange

MOST_DECISIONS = 200_000
"""The most contributions that the averager decides on, each of which takes some 70 microseconds."""
MOST_ROUNDS, MOST_DRAWN = 20_000, 200_000_000
"""The most rounds that are computed for all workers at once, and the most windows in them."""


def simulate_epoch(
    exchange: Exchange, cluster: Cluster, steps: int, note: Note | None = None
) -> Epoch:
    """Simulate an epoch.

    Args:
        exchange: what is exchanged.
        cluster: who trains.
        steps: optimizer steps of each worker.
        note: told what workers do.
    """
    in_driver = exchange.way == "driver"
    if in_driver and (cluster.losses is not None or not exchange.policy().in_step):
        windows = exchange.windows(steps, max(1, MOST_DECISIONS // cluster.workers))
        epoch = DriverRun(exchange, cluster, windows, note).train()
    else:
        windows = exchange.windows(steps, max(1, min(MOST_ROUNDS, MOST_DRAWN // cluster.workers)))
        epoch = array_rounds(exchange, cluster, windows, note)
    epoch.part, epoch.rounds = sum(windows) / steps, exchange.rounds(steps)
    return epoch
