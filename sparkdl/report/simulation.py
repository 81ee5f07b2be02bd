"""``sparkdl.simulate``: what a fit would take on another cluster, with whatever strategy."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparkdl.errors import ConfigError
from sparkdl.phases import COMPUTE, EXCHANGE, PHASES, WAIT
from sparkdl.planner.cluster import Cluster
from sparkdl.planner.exchanges import Exchange, State, exchange_of, of_traffic
from sparkdl.planner.links import Link
from sparkdl.planner.profile import Profile
from sparkdl.planner.simulated import Simulated, simulate_epoch
from sparkdl.planner.step_times import LogNormal, StepTimes, fitted
from sparkdl.report.html import duration, octets
from sparkdl.report.page import STYLE
from sparkdl.report.recording import Failure, Recording, Setup
from sparkdl.report.sections import shares, timeline
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


def simulate(
    fit: TrainingSummary | Profile,
    *,
    workers: int,
    link: str | float | Link,
    strategies: Sequence[Strategy[Any] | Exchange] | None = None,
    slow: Mapping[int, float] | None = None,
    step_s: float | Sequence[float] | StepTimes | None = None,
    rows: int | None = None,
    optimizer_state: float | None = None,
    workers_per_host: int = 1,
    topology: Literal["ring", "tree"] = "ring",
    losses: float | Mapping[int, float] | None = None,
    restart_s: float = 10.0,
    seed: int = 0,
) -> Simulation:
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
        step_s: seconds of a step, its feed included: a number, measured ones, or a distribution,
            ``LogNormal`` or ``ShiftedGamma``. None for what the fit has recorded, whose steps vary
            as its windows did if there were 20 or more.
        rows: of an epoch, all workers' together; None for the fit's.
        optimizer_state: copies of the parameters in the optimizer's state: 0 for SGD, 1 with
            momentum, 2 for Adam. None for what the fit has exchanged beside the model, if it did.
        workers_per_host: how many share a host, and its link.
        topology: whether workers sum among themselves in a ``ring`` or up and down a ``tree``.
        losses: seconds from the start after which ranks are lost, by rank; or the seconds that pass
            on average between two losses of one worker. None if none is lost.
        restart_s: seconds until a lost worker can train again; with a strategy whose workers need
            each other, until all can.
        seed: determines everything that is drawn.

    Raises:
        ConfigError: an argument is out of range, the fit has no round, or it is not known what a
            strategy sends.
    """
    profile = fit if isinstance(fit, Profile) else fit.profile
    if rows is not None and (isinstance(rows, bool) or rows < 1):
        raise ConfigError(f"rows must be a whole number >= 1, got {rows!r}")
    cluster = Cluster(
        workers=workers,
        link=Link.parse(link),
        times=_times(fit, profile, step_s),
        slow=dict(slow or {}),
        per_host=workers_per_host,
        losses=losses,
        restart_s=restart_s,
        seed=seed,
    )
    state = _state(profile, optimizer_state)
    compared = list(STRATEGIES if strategies is None else strategies)
    exchanges = [exchange_of(each, state, workers, topology) for each in compared]
    if strategies is None and profile.traffic is not None:
        exchanges.append(of_traffic(f"as fitted: {profile.strategy}", profile.traffic))
    if not exchanges:
        raise ConfigError("strategies is empty: name one or more, or None for the usual ones")
    steps = math.ceil((rows or profile.rows) / (workers * profile.batch_size))
    simulated = [simulate_epoch(each, cluster, steps) for each in exchanges]
    return Simulation(profile, cluster, tuple(sorted(simulated, key=lambda each: each.seconds)))


def _times(
    fit: TrainingSummary | Profile,
    profile: Profile,
    given: float | Sequence[float] | StepTimes | None,
) -> StepTimes:
    if isinstance(given, StepTimes):
        return given
    if isinstance(given, (int, float)):
        return LogNormal(float(given))
    if given is not None:
        return fitted(given)
    if isinstance(fit, TrainingSummary):
        ratios, steps = fit.recording.window_ratios(profile.batch_size)
        if len(ratios) >= FEW:
            return fitted(ratios * (profile.step_s * steps), steps)
    return LogNormal(profile.step_s)


def _state(profile: Profile, copies: float | None) -> State:
    parameters = 4.0 * profile.trained
    if copies is not None:
        if not 0 <= copies < math.inf:
            raise ConfigError(f"optimizer_state must be a number >= 0, got {copies!r}")
        optimizer = copies * parameters
    else:
        sent = 0.0 if profile.traffic is None else max(profile.traffic.up, profile.traffic.state)
        optimizer = max(0.0, sent - profile.model_bytes)
    return State(
        parameters=parameters,
        buffers=max(0.0, profile.model_bytes - parameters),
        optimizer=optimizer,
    )


@dataclass(frozen=True, repr=False)
class Simulation:
    """Epochs of several strategies on one cluster, the fastest first.

    Attributes:
        profile: of the fit that it starts from.
        cluster: what was simulated.
        epochs: one for each strategy.
    """

    profile: Profile
    cluster: Cluster
    epochs: tuple[Simulated, ...]

    @property
    def table(self) -> pd.DataFrame:
        """One row per strategy; the columns are those of ``Simulated``."""
        import pandas as pd

        rows = [asdict(replace(each, outcome=None)) for each in self.epochs]  # type: ignore[arg-type]
        return pd.DataFrame(rows).drop(columns="outcome").set_index("strategy")

    @property
    def caption(self) -> str:
        """What was simulated, and where its figures were taken."""
        cluster, some = self.cluster, min(each.part for each in self.epochs)
        extrapolated = "" if some == 1 else f" Down to {100 * some:.1f} % of an epoch simulated."
        return (
            f"An epoch of {cluster.workers:,} workers at {cluster.link}, steps of "
            f"{duration(cluster.times.mean)} as measured on: {self.profile.machine}.{extrapolated}"
        )

    def timeline(self, strategy: int | str = 0) -> Timeline:
        """What each worker does when, drawn as in a training's report.

        Args:
            strategy: its place in the table, or its name there.

        Raises:
            ConfigError: there is none such.
        """
        names = [each.strategy for each in self.epochs]
        place = names.index(strategy) if strategy in names else strategy
        if not isinstance(place, int) or place not in range(len(names)):
            raise ConfigError(f"strategy must be one of {names}, or its place, got {strategy!r}")
        recording = recording_of(self.epochs[place], self.cluster)
        drawn = shares(recording) + timeline(recording, most_bins=256)
        title = html.escape(f"{names[place]}. {self.caption}")
        return Timeline(
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><style>{STYLE}</style>'
            f"</head><body><main><p>{title}</p>{drawn}</main></body></html>"
        )

    def _shown(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(
            {
                "seconds an epoch": [f"{each.seconds:.4g}" for each in self.epochs],
                "computing": [f"{100 * each.computing:.0f} %" for each in self.epochs],
                "waiting": [f"{100 * each.waiting:.0f} %" for each in self.epochs],
                "exchanging": [f"{100 * each.exchanging:.0f} %" for each in self.epochs],
                "busiest link": [octets(each.busiest_bytes) for each in self.epochs],
                "driver": [octets(each.driver_bytes) for each in self.epochs],
                "staleness": [f"{each.mean_staleness:.3g}" for each in self.epochs],
            },
            index=pd.Index([each.strategy for each in self.epochs], name="strategy"),
        )

    def __repr__(self) -> str:
        return f"{self.caption}\n{self._shown().to_string()}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.caption)}</p>{self._shown().to_html()}"


@dataclass(frozen=True, repr=False)
class Timeline:
    """A page with a timeline; a notebook shows it.

    Attributes:
        page: as HTML.
    """

    page: str

    def save(self, path: str | Path) -> None:
        """Write the page."""
        Path(path).write_text(self.page)

    def __repr__(self) -> str:
        return "Timeline: save(path) writes it as a page, and a notebook shows it"

    def _repr_html_(self) -> str:
        page = html.escape(self.page)
        return f'<iframe srcdoc="{page}" style="width:100%;height:36rem;border:0"></iframe>'


def recording_of(epoch: Simulated, cluster: Cluster) -> Recording:
    """What would have been recorded of the part of an epoch that was simulated."""
    recording = Recording(cluster.workers, Setup(strategy=epoch.strategy))
    recording.hosts = [
        f"host {rank // cluster.per_host}" for rank in range(cluster.workers)
    ]
    phases = [COMPUTE, WAIT, EXCHANGE]
    outcome = epoch.outcome
    for stretch in outcome.stretches:
        every = stretch.lane is None
        lanes = range(len(stretch.began)) if every else (stretch.lane,)
        columns = np.transpose(stretch.seconds) if every else (stretch.seconds,)
        begins, ends = (
            (stretch.began, stretch.ended) if every else ((stretch.began,), (stretch.ended,))
        )
        for lane, began, ended, did in zip(lanes, begins, ends, columns, strict=True):
            seconds = np.zeros(len(PHASES))
            seconds[phases] = did
            recording.lanes.add(float(began), float(ended), seconds, lane)
    total = np.zeros(len(PHASES))
    total[phases] = outcome.computed, outcome.waited, outcome.exchanged
    recording.seconds += total / cluster.workers
    recording.failures = [Failure(at, rank, "simulated") for at, rank in outcome.lost]
    recording.launched_s = 0.0
    recording.lasted(outcome.seconds)
    return recording
