"""``sparkdl.simulate``: what a fit would take on another cluster, with whatever strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.arguments import require_positive, require_whole
from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link
from sparkdl.planner.profile import Profile
from sparkdl.planner.simulation.array_rounds import array_rounds
from sparkdl.planner.simulation.cluster import Cluster, Epoch, LogNormal, fitted
from sparkdl.planner.simulation.driver_run import DriverRun
from sparkdl.planner.simulation.exchanges import Exchange, exchange_of, of_traffic
from sparkdl.report.summary import TrainingSummary
from sparkdl.strategies import (
    SSP,
    AsynchronousSGD,
    ElasticAveraging,
    GossipAveraging,
    GradientAllReduce,
    OuterOptimizer,
    ParameterAveraging,
    Strategy,
)

if TYPE_CHECKING:
    import pandas as pd

STRATEGIES: tuple[Strategy[Any], ...] = (
    GradientAllReduce(),
    ParameterAveraging(),
    ParameterAveraging(aggregation="executors"),
    ElasticAveraging(aggregation="executors"),
    ElasticAveraging(mode="asynchronous"),
    AsynchronousSGD(barrier=SSP(2)),
    OuterOptimizer(period=50),
    GossipAveraging(period=5),
)
"""What is compared unless others are named."""
FEW = 20
"""With fewer measured windows than this, nothing is said about how much steps vary."""
MOST_DECISIONS = 200_000
"""The most contributions that the averager decides on, each of which takes some 70 microseconds."""
MOST_ROUNDS, MOST_DRAWN = 20_000, 200_000_000
"""The most rounds that are computed for all workers at once, and the most windows in them."""


def simulate(
    fit: TrainingSummary | Profile,
    *,
    workers: int,
    link: str | float | Link,
    strategies: Sequence[Strategy[Any] | Exchange] | None = None,
    slow: Mapping[int, float] | None = None,
    step_s: float | LogNormal | None = None,
    rows: int | None = None,
    workers_per_host: int = 1,
    seed: int = 0,
) -> pd.DataFrame:
    """Simulate an epoch on another cluster, with several strategies.

    The averager's own decisions are asked in virtual time, and every transfer takes its share of a
    link. Nothing is trained: what a strategy does to the loss is not simulated.

    Args:
        fit: what to start from: ``model.summary``, or a profile of it.
        workers: how many to simulate.
        link: of each host and of the driver: ``"1 Gbit/s"``, ``"100 Mbit/s, 1 ms"``, or bytes a
            second.
        strategies: what to compare; None for the usual ones, and the fit's own if its traffic is
            known.
        slow: how many times as long the steps of some ranks take, for example ``{3: 4.0}``.
        step_s: seconds of a step, its feed included: a number, or their distribution, a
            ``LogNormal``. None for what the fit has recorded, whose steps vary as its windows did
            if there were 20 or more.
        rows: of an epoch, all workers' together; None for the fit's.
        workers_per_host: how many share a host, and its link.
        seed: determines everything that is drawn.

    Returns:
        A row for each strategy, the fastest first: ``seconds`` of an epoch; the parts of the
        workers' time in which they are ``computing``, ``exchanging`` their own values, and
        ``waiting`` for each other, for the driver or for its link; ``rounds`` of each worker;
        ``mean_staleness`` and ``max_staleness``; and the ``part`` of the epoch that was simulated,
        the rest of which is taken to be the same.

    Raises:
        ConfigError: an argument is out of range, the fit has no round or does not tell what a step
            computes, or it is not known what a strategy sends.
    """
    import pandas as pd

    if not isinstance(fit, (TrainingSummary, Profile)):
        raise ConfigError(f"a {type(fit).__name__} is no fit: give model.summary, or its profile")
    profile = fit if isinstance(fit, Profile) else fit.profile
    trained = profile.rows if rows is None else require_whole("rows", rows, 1)
    cluster = Cluster(
        workers=workers,
        link=Link.parse(link),
        times=_times(fit, profile, step_s),
        slow=dict(slow or {}),
        per_host=workers_per_host,
        seed=seed,
    )
    state = _state(profile)
    compared = STRATEGIES if strategies is None else strategies
    exchanges = [exchange_of(each, state) for each in compared]
    own = profile.strategy not in map(repr, compared)
    sent = profile.traffic
    if strategies is None and own and sent is not None:
        exchanges.append(of_traffic(f"as fitted: {profile.strategy}", sent))
    if not exchanges:
        raise ConfigError("strategies is empty: name one or more, or None for the usual ones")
    steps = math.ceil(trained / (workers * profile.batch_size))
    found = [simulate_epoch(each, cluster, steps).figures for each in exchanges]
    return pd.DataFrame(found).set_index("strategy").sort_values("seconds", kind="stable")


def simulate_epoch(exchange: Exchange, cluster: Cluster, steps: int) -> Epoch:
    """Simulate an epoch; one with too many windows is as long as its first ones let expect.

    Args:
        exchange: what is exchanged.
        cluster: who trains.
        steps: optimizer steps of each worker.
    """
    if exchange.way == "driver" and not exchange.policy().in_step:
        windows = exchange.windows(steps, max(1, MOST_DECISIONS // cluster.workers))
        epoch = DriverRun(exchange, cluster, windows).train()
    else:
        windows = exchange.windows(steps, max(1, min(MOST_ROUNDS, MOST_DRAWN // cluster.workers)))
        epoch = array_rounds(exchange, cluster, windows)
    epoch.part, epoch.rounds = sum(windows) / steps, exchange.rounds(steps)
    return epoch


def _times(
    fit: TrainingSummary | Profile,
    profile: Profile,
    given: float | LogNormal | None,
) -> LogNormal:
    if isinstance(given, LogNormal):
        return given
    if given is None and not profile.only_computes:
        raise ConfigError(
            f"this fit with {profile.strategy:.80} does not tell computing from sending gradients, "
            "which goes on at the same time: give step_s, or the summary of a fit with 1 worker"
        )
    if given is not None:
        return LogNormal(require_positive("step_s", given))
    if isinstance(fit, TrainingSummary):
        ratios, steps = fit.recording.window_ratios(profile.batch_size)
        if len(ratios) >= FEW:
            return fitted(ratios * (profile.step_s * steps), steps)
    return LogNormal(profile.step_s)


def _state(profile: Profile) -> dict[str, float]:
    """Bytes of what replicas hold, by kind; of the optimizer, what the fit has exchanged."""
    parameters = 4.0 * profile.trained
    sent = 0.0 if profile.traffic is None else max(profile.traffic.up, profile.traffic.state)
    optimizer = max(0.0, sent - profile.model_bytes)
    buffers = max(0.0, profile.model_bytes - parameters)
    return {"parameters": parameters, "buffers": buffers, "optimizer": optimizer}
