"""A plan: what an epoch would take with other numbers of workers, periods and links."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.arguments import require_whole
from sparkdl.errors import ConfigError
from sparkdl.planner import costs
from sparkdl.planner.advice import Suggestion, draw, explained, suggested
from sparkdl.planner.links import Link, require_efficiency
from sparkdl.planner.profile import Profile, require_same
from sparkdl.planner.traffic import Traffic, along

if TYPE_CHECKING:
    import pandas as pd

    from sparkdl.strategies import ColorTrees

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
        parts, sent = self.parts, self.sent
        named = {
            "waiting for the slowest worker": parts.uneven,
            max(sent, key=sent.__getitem__): parts.passing,
            "what rounds take whatever they send": parts.fixed,
        }
        return max(named, key=named.__getitem__)

    @property
    def sent(self) -> dict[str, float]:
        """What takes the seconds of what is sent, in words, and how many."""
        parts, link = self.parts, f"{self.whose} link{'s' if 'workers' in self.whose else ''}"
        if parts.link is None:
            return {f"{link} and the processors": parts.passing}
        of_processors = "the processors' work on what is sent"
        return {link: parts.link, of_processors: parts.passing - parts.link}


class Plan:
    """Predictions of a training's epochs from profiles of fits.

    Each number of workers has its rows spread evenly, one worker a host as long as the fits had
    one, and minibatches of the size that the fits had.

    Where means are formed is compared as far as there are fits of each.

    Args:
        profiles: of one model and strategy; several may differ in workers, in minibatches and in
            the strategy's ``aggregation``.
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
        unknown = [each.strategy for each in self.profiles if each.traffic is None]
        if unknown or first.traffic is None:
            raise ConfigError(
                f"there is no formula for what {unknown[0]:.120} sends, so its rounds cannot "
                "be predicted. There is for averaging, elastic averaging, gradients (whole, fp16, "
                "bf16 or PowerSGD) and whatever passes through the driver in a fixed size and "
                "period; or measure it with each number of workers"
            )
        self.link = None if link is None else Link.parse(link)
        self.measured_on = None if measured_on is None else Link.parse(measured_on)
        self.workers = sorted({_count(each) for each in workers})
        if not self.workers:
            raise ConfigError(f"workers={workers!r} are none to plan for")
        self.rows = first.rows if rows is None else require_whole("rows", rows, 1)
        sizes = {each.batch_size for each in self.profiles}
        self.batch_size = first.batch_size
        if batch_size is not None:
            self.batch_size = require_whole("batch_size", batch_size, 1)
            if len(sizes) < 2 and self.batch_size not in sizes:
                raise ConfigError(
                    f"the fits had minibatches of {first.batch_size} rows only, which does not "
                    f"tell what {batch_size} rows take: add a profile with another batchSize"
                )
        self.traffic: Traffic = first.traffic
        self.own = first.aggregation
        self._by_place: dict[str | None, list[Profile]] = {}
        for each in self.profiles:
            self._by_place.setdefault(each.aggregation, []).append(each)
        self.costs = {where: self._fit(where, self.link) for where in self.aggregations}
        self.per_host = math.ceil(first.workers / first.hosts)

    @property
    def aggregations(self) -> list[str | None]:
        """Where the fits formed their means, the first one's place first."""
        return list(self._by_place)

    @property
    def not_measured(self) -> list[str]:
        """Where means could be formed too, which no fit did."""
        others = [each for each in self.traffic.places if each not in self._by_place]
        return [each for each in others if each != "hierarchical" or self.per_host > 1]

    def predict(
        self,
        workers: int,
        *,
        aggregation: str | None = None,
        period: int | None = None,
        link: Link | None = None,
        reduction: ColorTrees | None = None,
    ) -> Prediction:
        """What an epoch would take.

        Args:
            workers: how many.
            aggregation: where means are formed, one of ``aggregations``; None for the first.
            period: steps between two exchanges; None for the fits'.
            link: what connects the hosts; None for the plan's.
            reduction: trees along which workers add up; None for the fits' way.

        Raises:
            ConfigError: no fit formed its means there, or something cannot be planned for.
        """
        count = _count(workers)
        where = self.own if aggregation is None else aggregation
        traffic = replace(self._traffic(where, period), **along(reduction))
        fitted = self.costs[where] if link is None else self._fit(where, link)

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
            longest = max(longest, require_whole("max_period", max_period, 1))
        found = [
            each
            for where in self.aggregations
            for workers in range(1, self.workers[-1] + 1)
            for each in [self._least_period(workers, where, alpha, longest)]
            if each.efficiency >= alpha
        ]
        return suggested(self, min(found, key=lambda each: (each.seconds, each.workers)))

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

    def _fit(self, where: str | None, link: Link | None) -> costs.Fitted:
        others = [each for each in self.profiles if each.aggregation != where]
        return costs.fit(self._by_place[where], link, self.measured_on, others=others)

    def _traffic(self, where: str | None, period: int | None) -> Traffic:
        """What is exchanged where means are formed there, with another period if there is one."""
        if where not in self._by_place:
            known = where in self.traffic.places
            raise ConfigError(
                f"aggregation={where!r} "
                + (
                    "was not measured, and what an exchange takes there does not follow from its "
                    "bytes: fit once with it on 2 workers, and give the plan both summaries"
                    if known
                    else f"is none of {self.profiles[0].strategy:.80}'s"
                )
            )
        traffic = self._by_place[where][0].traffic
        assert traffic is not None
        if period is not None:
            self.require_period()
            traffic = replace(traffic, period=require_whole("period", period, 1))
        return traffic

    def require_period(self) -> None:
        """Check that the strategy has a period to change."""
        if self.traffic.hidden == "backward":
            raise ConfigError(
                f"{self.profiles[0].strategy:.80} exchanges in every step and has no period: raise "
                "batchSize, or train with ParameterAveraging"
            )


def _count(value: Any) -> int:
    count = require_whole("workers", value, 1)
    if count > MOST:
        raise ConfigError(f"workers must be a whole number <= {MOST:,}, got {value!r}")
    return count
