"""A plan: what an epoch would take with other numbers of workers, periods and links."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.arguments import require_whole
from sparkdl.errors import ConfigError
from sparkdl.planner import costs
from sparkdl.planner.advice import Prediction, in_words, lemmas
from sparkdl.planner.links import Link, require_efficiency
from sparkdl.planner.profile import Profile, require_same
from sparkdl.planner.traffic import Traffic

if TYPE_CHECKING:
    import pandas as pd

WORKERS = (1, 2, 4, 8, 16)
MOST = 100_000
"""Workers beyond which nothing is planned: ``best`` tries every number of them."""
MODEL_ERROR = 0.15
"""What predictions may be off by besides: benchmarks/planning.py holds them to it."""


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
        self.traffic: Traffic = first.traffic
        self.own, self.per_host = first.aggregation, first.per_host
        self.link = None if link is None else Link.parse(link)
        self.measured_on = None if measured_on is None else Link.parse(measured_on)
        self.network = self.link or self.measured_on
        self.workers = sorted({require_whole("workers", each, 1) for each in workers})
        if not self.workers:
            raise ConfigError(f"workers={workers!r} are none to plan for")
        if self.workers[-1] > MOST:
            raise ConfigError(f"workers must be at most {MOST:,}, got {self.workers[-1]:,}")
        self.rows = first.rows if rows is None else require_whole("rows", rows, 1)
        self.batch_size = first.batch_size
        if batch_size is not None:
            self.batch_size = require_whole("batch_size", batch_size, 1)
            sizes = {each.batch_size for each in self.profiles}
            if len(sizes) < 2 and self.batch_size not in sizes:
                raise ConfigError(
                    f"the fits had minibatches of {first.batch_size} rows only, which does not "
                    f"tell what {batch_size} rows take: add a profile with another batchSize"
                )
        self.aggregations = list(dict.fromkeys(each.aggregation for each in self.profiles))
        self._costs = {where: self._fit(where, self.link) for where in self.aggregations}

    @property
    def not_measured(self) -> list[str]:
        """Where means could be formed too, which no fit did."""
        others = [each for each in self.traffic.places if each not in self.aggregations]
        return [each for each in others if each != "hierarchical" or self.per_host > 1]

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
            aggregation: where means are formed, one of ``aggregations``; None for the first.
            period: steps between two exchanges; None for the fits'.
            link: what connects the hosts; None for the plan's.

        Raises:
            ConfigError: no fit formed its means there, or something cannot be planned for.
        """
        where = self.own if aggregation is None else aggregation
        if where not in self.aggregations:
            if where not in self.traffic.places:
                raise ConfigError(
                    f"aggregation={where!r} is none of {self.profiles[0].strategy:.80}'s"
                )
            raise ConfigError(
                f"aggregation={where!r} was not measured, and what an exchange takes there does "
                "not follow from its bytes: fit once with it on 2 workers, and give the plan both "
                "summaries"
            )
        traffic = next(each.traffic for each in self.profiles if each.aggregation == where)
        assert traffic is not None
        if period is not None:
            self._require_period()
            traffic = replace(traffic, period=require_whole("period", period, 1))
        fitted, low = self._costs[where] if link is None else self._fit(where, link)
        epoch = partial(
            costs.Costs.epoch,
            traffic=traffic,
            rows=self.rows,
            batch_size=self.batch_size,
            per_host=self.per_host,
        )
        count = require_whole("workers", workers, 1)
        parts, alone = epoch(fitted, workers=count), epoch(fitted, workers=1)
        limits = parts.seconds, epoch(low, workers=count).seconds
        error = math.hypot(MODEL_ERROR, self.profiles[0].spread or 0.0)
        return Prediction(
            workers=count,
            batch_size=self.batch_size,
            period=traffic.period,
            aggregation=where,
            parts=parts,
            low=min(limits) * (1 - error),
            high=max(limits) * (1 + error),  # for fewer workers than fitted, all of it fixed
            efficiency=alone.seconds / (count * parts.seconds),
            link="the workers' links" if traffic.through == "workers" else "the driver's link",
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

    def best(self, efficiency: float = 0.8, *, max_period: int | None = None) -> Prediction:
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
            self._require_period()
            longest = max(longest, require_whole("max_period", max_period, 1))
        found = [
            each
            for where in self.aggregations
            for workers in range(1, self.workers[-1] + 1)
            for each in [self._least_period(workers, where, alpha, longest)]
            if each.efficiency >= alpha
        ]
        best = min(found, key=lambda each: (each.seconds, each.workers))
        own = {"period": self.traffic.period, "aggregation": self.own}
        changed = {name: each for name in own if (each := getattr(best, name)) != own[name]}
        params = {"numWorkers": best.workers, "batchSize": best.batch_size}
        because = ", and no more workers were asked for"
        if best.workers < self.workers[-1]:
            period = changed.get("period")
            more = self.predict(best.workers + 1, aggregation=best.aggregation, period=period)
            because = f"; {more.workers} workers would have {more.efficiency:.0%}, because of "
            because += more.obstacle
        strategy = {"strategy": changed} if changed else {}
        return replace(best, params=params | strategy, because=because)

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
        most, (fitted, _) = self.workers[-1], self._costs[self.own]
        now, step = self.predict(most), fitted.step_s(self.batch_size)
        by_bytes, rest = fitted.exchange(self.traffic, most, self.per_host)
        parts = {
            "computing": now.parts.computing,
            "waiting for the slowest worker": now.parts.uneven,
            **now.sent,
            "what rounds take whatever they send": now.parts.fixed,
        }
        ordered = sorted(filter(parts.get, parts), key=parts.__getitem__, reverse=True)
        return "\n".join(
            [
                f"Measured with {self._measured_with} {self.profiles[0].machine}.",
                f"A step of {self.batch_size} rows takes {in_words(step)}; an exchange of {most} "
                f"workers takes {in_words(by_bytes + rest)}, of which {in_words(rest)} whatever is "
                "sent.",
                f"With {most} workers an epoch takes {now.range} at an efficiency of "
                f"{now.efficiency:.0%}: "
                + ", ".join(f"{each} {in_words(parts[each])}" for each in ordered)
                + ".",
                *lemmas(fitted, self.traffic, most, step, self.network),
                *(f"{name}: {in_words(each.seconds)}." for name, each in self._changes(most)),
                *(
                    f"Not compared: aggregation={where!r}, which no fit had. What an exchange "
                    "takes there does not follow from its bytes: fit once with it on 2 workers, "
                    "and give the plan both."
                    for where in self.not_measured
                ),
            ]
        )

    def _changes(self, workers: int) -> Iterator[tuple[str, Prediction]]:
        """What could be changed, and the epoch that it would give."""
        for where in self.aggregations[1:]:
            at = partial(self.predict, aggregation=where)
            counts = range(2, workers + 1)
            first = next((n for n in counts if at(n).seconds < self.predict(n).seconds), None)
            from_here = f", faster from {first} workers on" if first else ""
            yield f"With aggregation={where!r}{from_here}", at(workers)
        if self.traffic.hidden != "backward":
            period = 2 * self.traffic.period
            yield f"With period={period}", self.predict(workers, period=period)
        if self.network is not None:
            faster = replace(self.network, bandwidth=2 * self.network.bandwidth)
            yield f"On links of {faster}", self.predict(workers, link=faster)

    def __repr__(self) -> str:
        on = f" on links of {self.link}" if self.link else ""
        shown = self.table.to_string(
            index=False, float_format="{:.3g}".format, formatters={"efficiency": "{:.0%}".format}
        )
        return (
            f"Plan of {self.profiles[0].model or 'the model'}, {self.rows:,} rows an epoch{on}; "
            f"measured with {self._measured_with} {self.profiles[0].machine}\n{shown}"
        )

    def _repr_html_(self) -> str:
        return str(self.table.to_html(index=False, float_format="{:.3g}".format))

    @property
    def _measured_with(self) -> str:
        counts = sorted({each.workers for each in self.profiles})
        plural = "s" if counts != [1] else ""
        return f"{' and '.join(map(str, counts))} worker{plural}:"

    def _fit(self, where: str | None, link: Link | None) -> tuple[costs.Costs, costs.Costs]:
        """Costs as predicted, and at the lower end of what the profiles leave open."""
        fit = partial(costs.fit, self.profiles, where, link, self.measured_on)
        return fit(), fit(low=True)

    def _require_period(self) -> None:
        if self.traffic.hidden == "backward":
            raise ConfigError(
                f"{self.profiles[0].strategy:.80} exchanges in every step and has no period: raise "
                "batchSize, or train with ParameterAveraging"
            )
