"""The three plots of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.figures import new_figure
from sparkdl.planner.links import Link

if TYPE_CHECKING:
    from sparkdl.planner.plan import Plan

LINKS = ("100 Mbit/s", "300 Mbit/s", "1 Gbit/s", "3 Gbit/s", "10 Gbit/s")
"""Drawn beside the plan's own."""
COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#999999")
"""Of Okabe and Ito, which people can tell apart whatever their colour vision."""


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
