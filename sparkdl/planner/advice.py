"""What a plan advises, in words with the numbers behind them, and in plots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparkdl.figures import new_figure
from sparkdl.planner.links import Link, least_period, least_period_for, most_workers

if TYPE_CHECKING:
    from sparkdl.planner.plan import Plan, Prediction

GOOD = 0.8
"""The efficiency that explanations speak of."""
LINKS = ("100 Mbit/s", "300 Mbit/s", "1 Gbit/s", "3 Gbit/s", "10 Gbit/s")
"""Drawn beside the plan's own."""
COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#999999")
"""Of Okabe and Ito, which people can tell apart whatever their colour vision."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """What to choose, and why.

    Attributes:
        num_workers: how many workers.
        batch_size: rows per minibatch of each.
        period: steps between two exchanges.
        aggregation: where means are formed; None if the strategy leaves no choice.
        because: the reason.
        params: values of an estimator's Params by name, which ``estimator.copy`` takes.
    """

    num_workers: int
    batch_size: int
    period: int
    aggregation: str | None
    because: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        where = "" if self.aggregation is None else f", aggregation={self.aggregation!r}"
        chosen = f"numWorkers={self.num_workers}, batchSize={self.batch_size}"
        return f"{chosen}, period={self.period}{where}: {self.because}"


def suggested(plan: Plan, best: Prediction) -> Suggestion:
    """What to set for a prediction, and why no more workers.

    Args:
        plan: that it was chosen from.
        best: the prediction.
    """
    changed: dict[str, Any] = {}
    if best.period != plan.traffic.period:
        changed["period"] = best.period
    if best.aggregation != plan.own:
        changed["aggregation"] = best.aggregation
    strategy = {"strategy": changed} if changed else {}
    because = f"an epoch takes {_range(best)} at an efficiency of {best.efficiency:.0%}"
    if best.workers == plan.workers[-1]:
        because += ", and no more workers were asked for"
    else:
        more = plan.predict(
            best.workers + 1, aggregation=best.aggregation, period=changed.get("period")
        )
        because += f"; {more.workers} workers would have {more.efficiency:.0%}, because of "
        because += more.obstacle
    return Suggestion(
        num_workers=best.workers,
        batch_size=best.batch_size,
        period=best.period,
        aggregation=best.aggregation,
        because=because,
        params={"numWorkers": best.workers, "batchSize": best.batch_size, **strategy},
    )


def explained(plan: Plan) -> str:
    """What bounds a training with the most workers of a plan, and what would move that."""
    most, costs, traffic = plan.workers[-1], plan.costs[plan.own].costs, plan.traffic
    now, step = plan.predict(most), costs.step_s(plan.batch_size)
    by_bytes, rest = costs.exchange(traffic, most, plan.per_host)
    parts = {
        "computing": now.parts.computing,
        "waiting for the slowest worker": now.parts.uneven,
        **now.sent,
        "what rounds take whatever they send": now.parts.fixed,
    }
    ordered = sorted(parts, key=parts.__getitem__, reverse=True)
    lines = [
        f"Measured with {plan.measured_with} {plan.profiles[0].machine}.",
        f"A step of {plan.batch_size} rows takes {_time(step)}; an exchange of {most} workers "
        f"takes {_time(by_bytes + rest)}, of which {_time(rest)} whatever is sent.",
        f"With {most} workers an epoch takes {_range(now)} at an efficiency of "
        f"{now.efficiency:.0%}: "
        + ", ".join(f"{each} {_time(parts[each])}" for each in ordered if parts[each])
        + ".",
        *_lemmas(plan, most, step),
        *(f"{change}: {_time(each.seconds)}." for change, each in _changes(plan, most)),
        *(
            f"Not compared: aggregation={where!r}, which no fit had. What an exchange takes there "
            "does not follow from its bytes: fit once with it on 2 workers, and give the plan both."
            for where in plan.not_measured
        ),
    ]
    return "\n".join(lines)


def _lemmas(plan: Plan, workers: int, step: float) -> Iterator[str]:
    """What the lemmas say, where the rounds have the form that they suppose."""
    costs, traffic = plan.costs[plan.own].costs, plan.traffic
    if traffic.through == "workers" or traffic.hidden or not traffic.waits:
        return
    (alone, rest), many = costs.exchange(traffic, 1), costs.exchange(traffic, workers)
    overhead = alone / (traffic.every * step * costs.slowest + rest)
    if overhead:
        yield (
            f"What more workers do not divide is {overhead:.2g} times what they do: any number "
            f"of them is at most {1 + 1 / overhead:.3g} times as fast as one, and {GOOD:.0%} "
            f"efficient up to {most_workers(overhead, GOOD):g}."
        )
    period = least_period_for(GOOD, step, sum(many), alone + rest, costs.slowest)
    if math.isfinite(period):
        yield f"{workers} workers are {GOOD:.0%} efficient from period {period:g} on."
    if plan.network is not None:
        least = least_period(traffic.up, workers, plan.network.bandwidth, step)
        yield (
            "The driver's link carries their rounds in the time in which they compute from period "
            f"{least} on."
        )


def _changes(plan: Plan, workers: int) -> Iterator[tuple[str, Prediction]]:
    """What could be changed, and the epoch that it would give."""
    for where in plan.aggregations[1:]:
        cheaper = (
            each
            for each in range(2, workers + 1)
            if plan.predict(each, aggregation=where).seconds < plan.predict(each).seconds
        )
        first = next(cheaper, None)
        yield (
            f"With aggregation={where!r}" + (f", faster from {first} workers on" if first else ""),
            plan.predict(workers, aggregation=where),
        )
    from sparkdl.strategies import ColorTrees

    traffic, now = plan.traffic, plan.predict(workers)
    if traffic.through == "workers" and traffic.hidden != "steps" and not traffic.colors:
        trees = plan.predict(workers, reduction=ColorTrees())
        if trees.high < now.seconds:
            yield "With reduction=ColorTrees(), which is for CPUs", trees
    if plan.traffic.hidden != "backward":
        period = 2 * plan.traffic.period
        yield f"With period={period}", plan.predict(workers, period=period)
    if plan.network is not None:
        faster = replace(plan.network, bandwidth=2 * plan.network.bandwidth)
        yield f"On links of {faster}", plan.predict(workers, link=faster)


def _range(each: Prediction) -> str:
    return f"{_time(each.seconds)} ({_time(each.low)} to {_time(each.high)})"


def _time(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def draw(plan: Plan) -> Any:
    """Draw speed-up by workers, where the time goes, and seconds by link.

    Returns:
        matplotlib's figure, with three axes.

    Raises:
        SetupError: matplotlib is not installed.
    """
    figure = new_figure(13, 3.8)
    speed, parts, links = figure.subplots(1, 3)
    names = [str(each) for each in plan.workers]

    for where in plan.aggregations:
        found = [plan.predict(each, aggregation=where) for each in plan.workers]
        alone = plan.predict(1, aggregation=where).seconds
        speed.plot(
            plan.workers, [alone / each.seconds for each in found], marker="o", label=where or ""
        )
        if where == plan.aggregations[0]:
            low = [alone / each.high for each in found]
            high = [alone / each.low for each in found]
            speed.fill_between(plan.workers, low, high, alpha=0.2)
    speed.plot(plan.workers, plan.workers, color="black", linewidth=0.8, linestyle=":")
    speed.set_ylim(0, 1.05 * plan.workers[-1])
    speed.set_xticks(plan.workers)
    speed.set(xlabel="workers", ylabel="times as fast as one", title="Speed-up")
    if plan.aggregations != [None]:
        speed.legend(title="aggregation")

    found = [plan.predict(each) for each in plan.workers]
    below = [0.0] * len(found)
    for name, colour in zip(("computing", "uneven", "passing", "fixed"), COLOURS, strict=True):
        heights = [getattr(each.parts, name) for each in found]
        parts.bar(names, heights, bottom=below, color=colour, label=name)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    parts.set(xlabel="workers", ylabel="seconds an epoch", title="Where the time goes")
    parts.legend()

    latency = plan.link.latency if plan.link is not None else 0.0
    speeds = {replace(Link.parse(each), latency=latency) for each in LINKS}
    speeds |= set() if plan.link is None else {plan.link}
    ordered = sorted(speeds, key=lambda each: each.bandwidth)
    for workers in plan.workers:
        seconds = [plan.predict(workers, link=each).seconds for each in ordered]
        links.plot([8e-6 * each.bandwidth for each in ordered], seconds, label=str(workers))
    if plan.link is not None:
        links.axvline(8e-6 * plan.link.bandwidth, color="black", linewidth=0.8, linestyle=":")
    links.set(xscale="log", yscale="log", title="What links and workers buy")
    links.set(xlabel="Mbit/s", ylabel="seconds an epoch")
    links.legend(title="workers")
    return figure
