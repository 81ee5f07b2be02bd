"""A plan: what an epoch would take with other numbers of workers, periods and links."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError
from sparkdl.planner import costs
from sparkdl.planner.advice import Suggestion, explained, suggested
from sparkdl.planner.lemmas import require_efficiency
from sparkdl.planner.links import Link
from sparkdl.planner.profile import Profile, require_same
from sparkdl.planner.traffic import Traffic

if TYPE_CHECKING:
    import pandas as pd

WORKERS = (1, 2, 4, 8, 16)
MODEL_ERROR = 0.15
"""What predictions may be off by besides: benchmarks/planning.py holds them to it."""
MOST = 100_000
"""Workers beyond which nothing is planned."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An epoch.

    Attributes:
        workers: how many.
        batch_size: rows per minibatch of each.
        period: steps between two exchanges.
        aggregation: where means are formed; None if the strategy leaves no choice.
        parts: where its seconds go.
        low: the fewest seconds that it may take.
        high: the most.
        efficiency: one worker's seconds / these / workers.
        measured: whether the fit formed its means there too; otherwise only bytes tell.
        whose: the busiest link is: ``the driver's`` or ``the workers'``.
    """

    workers: int
    batch_size: int
    period: int
    aggregation: str | None
    parts: costs.Parts
    low: float
    high: float
    efficiency: float
    measured: bool
    whose: str

    @property
    def seconds(self) -> float:
        """Of an epoch."""
        return self.parts.seconds

    @property
    def bound(self) -> str:
        """What takes most of the time, in words."""
        others = self.parts.uneven, self.parts.passing, self.parts.fixed
        return self.obstacle if max(others) > self.parts.computing else "computing"

    @property
    def obstacle(self) -> str:
        """What takes most of the time beside computing, in words."""
        parts = {
            "waiting for the slowest worker": self.parts.uneven,
            f"{self.whose} link{'s' if 'workers' in self.whose else ''}": self.parts.passing,
            "what rounds take whatever they send": self.parts.fixed,
        }
        return max(parts, key=parts.__getitem__)


class Plan:
    """Predictions of a training's epochs from profiles of fits.

    Each number of workers has its rows spread evenly, one worker a host as long as the fits had
    one, and minibatches of the size that the fits had.

    Args:
        profiles: of one model and strategy; several may differ in workers and minibatches.
        link: what connects the hosts, as ``Link.parse`` takes it; None for the network on which the
            profiles were taken.
        measured_on: that network's links, if they were slow enough to matter and ``link`` is given.
        workers: the numbers of workers to show.
        rows: rows of an epoch; None for those of the fits.
        batch_size: rows per minibatch; None for that of the first profile.

    Raises:
        ConfigError: the profiles are of different trainings, there is no formula for what their
            strategy exchanges, or something cannot be planned for.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        *,
        link: str | float | Link | None = None,
        measured_on: str | float | Link | None = None,
        workers: Sequence[int] = WORKERS,
        rows: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        require_same(profiles)
        self.profiles = tuple(profiles)
        first = self.profiles[0]
        if first.traffic is None:
            raise ConfigError(
                f"there is no formula for what {first.strategy:.120} sends, so its rounds cannot "
                "be predicted. There is for averaging, elastic averaging, gradients (whole, fp16, "
                "bf16 or PowerSGD) and whatever passes through the driver in a fixed size and "
                "period; or measure it with each number of workers"
            )
        self.link = None if link is None else Link.parse(link)
        self.measured_on = None if measured_on is None else Link.parse(measured_on)
        self.workers = sorted({_whole("workers", each) for each in workers})
        if not self.workers:
            raise ConfigError(f"workers={workers!r} are none to plan for")
        self.rows = first.rows if rows is None else _whole("rows", rows, most=None)
        sizes = {each.batch_size for each in self.profiles}
        self.batch_size = first.batch_size
        if batch_size is not None:
            self.batch_size = _whole("batch_size", batch_size, most=None)
            if len(sizes) < 2 and self.batch_size not in sizes:
                raise ConfigError(
                    f"the fits had minibatches of {first.batch_size} rows only, which does not "
                    f"tell what {batch_size} rows take: add a profile with another batchSize"
                )
        self.traffic: Traffic = first.traffic
        self.own = first.aggregation
        self.fitted = self._fit(self.link)
        self.per_host = math.ceil(first.workers / first.hosts)

    @property
    def aggregations(self) -> list[str | None]:
        """Where means could be formed, the fits' own choice first."""
        others = [each for each in self.traffic.places if each != self.own]
        if self.per_host == 1 and "hierarchical" in others:
            others.remove("hierarchical")
        return [self.own, *others]

    def predict(
        self,
        workers: int,
        *,
        aggregation: str | None = None,
        period: int | None = None,
        link: Link | None = None,
    ) -> Prediction:
        """What an epoch would take.

        Args:
            workers: how many.
            aggregation: where means are formed; None for where the fits formed them.
            period: steps between two exchanges; None for the fits'.
            link: what connects the hosts; None for the plan's.
        """
        count = _whole("workers", workers)
        fitted = self.fitted if link is None else self._fit(link)
        where = self.own if aggregation is None else aggregation
        traffic = self.traffic_at(where, period)

        def epoch(model: costs.Costs, workers: int) -> costs.Parts:
            return model.epoch(
                traffic,
                rows=self.rows,
                workers=workers,
                batch_size=self.batch_size,
                per_host=self.per_host,
            )

        parts, alone = epoch(fitted.costs, count), epoch(fitted.costs, 1)
        error = math.hypot(MODEL_ERROR, self.profiles[0].spread or 0.0)
        return Prediction(
            workers=count,
            batch_size=self.batch_size,
            period=traffic.period,
            aggregation=where,
            parts=parts,
            low=epoch(fitted.low, count).seconds * (1 - error),
            high=parts.seconds * (1 + error),
            efficiency=alone.seconds / (count * parts.seconds),
            measured=where == self.own,
            whose="the workers'" if traffic.through == "workers" else "the driver's",
        )

    @property
    def table(self) -> pd.DataFrame:
        """The predictions: a row for each number of workers and place to form means."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "workers": each.workers,
                    "batch": each.batch_size,
                    "period": each.period,
                    "aggregation": each.aggregation or "-",
                    "seconds an epoch": each.seconds,
                    "from": each.low,
                    "to": each.high,
                    "efficiency": each.efficiency,
                    "bound by": each.bound,
                }
                for workers in self.workers
                for each in [self.predict(workers, aggregation=x) for x in self.aggregations]
            ]
        )

    def best(self, efficiency: float = 0.8, *, max_period: int | None = None) -> Suggestion:
        """The fastest epoch that still uses its workers well.

        Args:
            efficiency: the least, in (0, 1]: the speed-up for each worker.
            max_period: the longest period that the training may have; None for the fits' own. A
                longer one learns a little less from each row.

        Raises:
            ConfigError: they are out of range, or the strategy has no period to change.
        """
        alpha = require_efficiency(efficiency)
        longest = self.traffic.period
        if max_period is not None:
            self.require_period()
            longest = max(longest, _whole("max_period", max_period, most=None))
        found = [
            each
            for where in self.aggregations
            for workers in range(1, self.workers[-1] + 1)
            for each in [self._least_period(workers, where, alpha, longest)]
            if each.efficiency >= alpha
        ]
        # What was not measured has to be better by more than predictions are wrong.
        penalty = {True: 1.0, False: 1 + MODEL_ERROR}
        best = min(found, key=lambda each: (each.seconds * penalty[each.measured], each.workers))
        return suggested(self, best)

    def _least_period(
        self, workers: int, aggregation: str | None, alpha: float, longest: int
    ) -> Prediction:
        """The prediction at the shortest period that is so efficient, or at the longest."""
        now = self.predict(workers, aggregation=aggregation)
        if now.efficiency >= alpha or longest <= now.period:
            return now
        periods = range(now.period, longest)
        at = partial(self.predict, workers, aggregation=aggregation)
        index = bisect_left(periods, True, key=lambda p: at(period=p).efficiency >= alpha)
        return at(period=now.period + index)

    def explain(self) -> str:
        """What bounds the training with the most workers of the plan, and what would move that."""
        return explained(self)

    def plot(self) -> Any:
        """Draw speed-up, where the time goes, and what faster links would buy.

        Returns:
            matplotlib's figure.

        Raises:
            SetupError: matplotlib is not installed.
        """
        from sparkdl.planner.drawing import draw

        return draw(self)

    def __repr__(self) -> str:
        on = f" on links of {self.link}" if self.link else ""
        shown = self.table.to_string(
            index=False, float_format="{:.3g}".format, formatters={"efficiency": "{:.0%}".format}
        )
        return (
            f"Plan of {self.profiles[0].model or 'the model'}, {self.rows:,} rows an epoch{on}; "
            f"measured with {self.measured_with} {self.profiles[0].machine}\n{shown}"
        )

    def _repr_html_(self) -> str:
        return str(self.table.to_html(index=False, float_format="{:.3g}".format))

    @property
    def measured_with(self) -> str:
        """The numbers of workers of the fits, in words."""
        counts = sorted({each.workers for each in self.profiles})
        plural = "s" if counts != [1] else ""
        return f"{' and '.join(map(str, counts))} worker{plural}:"

    @property
    def network(self) -> Link | None:
        """The links that are planned for, if they are known."""
        return self.link or self.measured_on

    def _fit(self, link: Link | None) -> costs.Fitted:
        return costs.fit(self.profiles, link, self.measured_on)

    def traffic_at(self, aggregation: str | None, period: int | None) -> Traffic:
        """What is exchanged with another aggregation or period; None for the fits'."""
        traffic = self.traffic
        if aggregation is not None and aggregation != self.own:
            if aggregation not in traffic.places:
                raise ConfigError(
                    f"aggregation={aggregation!r} is none of {self.profiles[0].strategy:.80}'s"
                )
            traffic = traffic.among(aggregation)
        if period is not None:
            self.require_period()
            traffic = replace(traffic, period=_whole("period", period, most=None))
        return traffic

    def require_period(self) -> None:
        """Check that the strategy has a period to change."""
        if self.traffic.hidden == "backward":
            raise ConfigError(
                f"{self.profiles[0].strategy:.80} exchanges in every step and has no period: raise "
                "batchSize, or train with ParameterAveraging"
            )


def _whole(name: str, value: Any, *, most: int | None = MOST) -> int:
    whole = not isinstance(value, bool) and isinstance(value, int)
    if not whole or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f" and <= {most:,}"
        raise ConfigError(f"{name} must be a whole number >= 1{limit}, got {value!r}")
    return int(value)
