"""What an epoch is predicted to take, and which part of it, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdl.planner.costs import Costs, Parts
from sparkdl.planner.links import Link, least_period, most_workers
from sparkdl.planner.traffic import Traffic

GOOD = 0.8
"""The efficiency that explanations speak of."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An epoch, and what to set for it.

    Attributes:
        workers: how many.
        batch_size: rows per minibatch of each.
        period: steps between two exchanges.
        aggregation: where means are formed; None if the strategy leaves no choice.
        parts: where its seconds go.
        low: the fewest seconds that it may take.
        high: the most.
        efficiency: one worker's seconds / these / workers.
        link: the busiest one: ``the driver's link`` or ``the workers' links``.
        params: of a suggestion, values of an estimator's Params by name, which ``estimator.copy``
            takes.
        because: of a suggestion, why no more workers.
    """

    workers: int
    batch_size: int
    period: int
    aggregation: str | None
    parts: Parts
    low: float
    high: float
    efficiency: float
    link: str
    params: Mapping[str, Any] = field(default_factory=dict)
    because: str = ""

    @property
    def seconds(self) -> float:
        """Of an epoch."""
        return self.parts.seconds

    @property
    def sent(self) -> dict[str, float]:
        """What takes the seconds of what is sent, in words, and how many."""
        parts = self.parts
        if parts.link is None:
            return {f"{self.link} and the processors": parts.passing}
        of_processors = "the processors' work on what is sent"
        return {self.link: parts.link, of_processors: parts.passing - parts.link}

    @property
    def obstacle(self) -> str:
        """What takes most of the time beside computing, in words."""
        named = {
            "waiting for the slowest worker": self.parts.uneven,
            max(self.sent, key=self.sent.__getitem__): self.parts.passing,
            "what rounds take whatever they send": self.parts.fixed,
        }
        return max(named, key=named.__getitem__)

    @property
    def bound(self) -> str:
        """What takes most of the time, in words."""
        others = self.parts.uneven, self.parts.passing, self.parts.fixed
        return self.obstacle if max(others) > self.parts.computing else "computing"

    @property
    def range(self) -> str:
        """The seconds, and between which they may lie, in words."""
        return f"{in_words(self.seconds)} ({in_words(self.low)} to {in_words(self.high)})"

    def __str__(self) -> str:
        where = "" if self.aggregation is None else f", aggregation={self.aggregation!r}"
        return (
            f"numWorkers={self.workers}, batchSize={self.batch_size}, period={self.period}{where}: "
            f"an epoch takes {self.range} at an efficiency of {self.efficiency:.0%}{self.because}"
        )


def in_words(seconds: float) -> str:
    """A time with its unit."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def lemmas(
    costs: Costs, traffic: Traffic, workers: int, step_s: float, network: Link | None
) -> Iterator[str]:
    """What the lemmas say, where the rounds have the form that they suppose.

    Args:
        costs: of a step and an exchange.
        traffic: what is exchanged.
        workers: how many.
        step_s: seconds of a step.
        network: the links, if they are known.
    """
    if traffic.through == "workers" or traffic.hidden or not traffic.waits:
        return
    alone, rest = costs.exchange(traffic, 1)
    if overhead := alone / (traffic.every * step_s * costs.slowest + rest):
        yield (
            f"What more workers do not divide is {overhead:.2g} times what they do: any number of "
            f"them is at most {1 + 1 / overhead:.3g} times as fast as one, and {GOOD:.0%} "
            f"efficient up to {most_workers(overhead, GOOD):g}."
        )
    if network is not None:
        least = least_period(traffic.up, workers, network.bandwidth, step_s)
        yield (
            "The driver's link carries their rounds in the time in which they compute from period "
            f"{least} on."
        )
