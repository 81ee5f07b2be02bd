"""What workers report, and what the driver makes of it for progress bars and histories."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MetricValue = float | list[Any] | dict[str, Any]
"""A metric's value, in JSON's types: a number; a list of such values, for example one per class; or
a dict of such values by name."""

MOST_MEASURED = 16
"""How many numbers a strategy may measure."""
LONGEST_NAME = 64
"""The most characters in such a number's name."""
LARGEST = sys.float_info.max
"""The largest float; JSON's integers may exceed it."""


def is_metric_value(value: object) -> bool:
    """Whether something is a ``MetricValue``."""
    if isinstance(value, list):
        return all(map(is_metric_value, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_metric_value(each) for key, each in value.items())
    return isinstance(value, (int, float))


def are_measured(value: object) -> bool:
    """Whether something can be what a strategy measured: a few finite numbers by name."""
    return (
        isinstance(value, dict)
        and len(value) <= MOST_MEASURED
        and all(isinstance(name, str) and len(name) <= LONGEST_NAME for name in value)
        and all(type(each) in (float, int) and abs(each) <= LARGEST for each in value.values())
    )


def are_metrics(value: object) -> bool:
    """Whether something is a dict of metrics' values by name."""
    return isinstance(value, dict) and is_metric_value(value)


NOTHING = 1e-12
"""The weight of a row in a window in which nothing counts, less than any float32 can tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowReport:
    """What one worker did since its last contribution; travels with each contribution."""

    rank: int
    """The worker's rank."""
    epoch: int
    """Epoch counted from 1."""
    step: int
    """The worker's optimizer steps since the start of training."""
    examples: int
    """Rows trained on in this window."""
    loss_sum: float
    """Sum over those rows of the loss (the minibatch mean times its divisor)."""
    last: bool
    """Whether this window was the worker's last of the epoch."""
    counted: float | None = None
    """Sum of what the minibatches' losses were divided by; None where those were their rows."""
    step_of_epoch: int = 0
    """The worker's optimizer steps since the start of the epoch."""
    group_weight: float | None = None
    """The weight of all workers that formed this contribution together; 0 for those among them that
    do not send it, 1 where all contributions count equally, None where each has its own weight."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What the worker's strategy has measured, by name."""
    staleness: int = 0
    """How often the center has been updated since the worker received the one it began with.
    Counted by the averager; always 0 where every worker takes part in every round."""

    @property
    def divisor(self) -> float:
        """What to divide ``loss_sum`` by: the rows, or what counts in them."""
        return self.examples if self.counted is None else self.counted

    @property
    def weight(self) -> float:
        """How much the contribution counts: its divisor; at 0 there is no contribution."""
        if self.group_weight is not None:
            return self.group_weight
        # Where nothing counts in anyone's window, what the optimizers did without is agreed on.
        return max(self.divisor, NOTHING * self.examples)


@dataclass(kw_only=True, slots=True)
class WindowSums:
    """What one worker's windows of an epoch add up to; as large after a million of them."""

    rank: int
    """The worker's rank."""
    examples: int = 0
    """Rows trained on."""
    longest: int = 0
    """The most rows in one window."""
    loss_sum: float = 0.0
    """Sum of the windows' ``loss_sum``."""
    divisor: float = 0
    """Sum of the windows' divisors."""
    weight: float = 0
    """Sum of the windows' weights."""
    contributions: int = 0
    """How many of the windows have a weight."""
    staleness: int = 0
    """Sum of the staleness of those."""
    max_staleness: int = 0
    """The largest staleness among them."""
    last: bool = False
    """Whether the worker's last window of the epoch is among them."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What the worker's strategy has measured last, by name."""

    def add(self, window: WindowReport) -> None:
        """Add the worker's next window."""
        self.examples += window.examples
        self.longest = max(self.longest, window.examples)
        self.loss_sum += window.loss_sum
        self.divisor += window.divisor
        self.last |= window.last
        if window.measured:
            self.measured = {**self.measured, **window.measured}
        if weight := window.weight:
            self.weight += weight
            self.contributions += 1
            self.staleness += window.staleness
            self.max_staleness = max(self.max_staleness, window.staleness)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationReport:
    """What one worker found on its held-out rows at the end of an epoch."""

    rank: int
    """The worker's rank."""
    epoch: int
    """Epoch counted from 1."""
    examples: int
    """Held-out rows of the worker."""
    loss_sum: float
    """Sum of the (weighted) loss over them."""
    weight: float
    """Sum of the rows' weights, their number if they have none, or of what the loss divides by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSummary:
    """One row of a model's training history."""

    epoch: int
    """Epoch counted from 1."""
    loss: float
    """Mean training loss over the rows of the epoch, or over the labels that count, as seen by the
    replicas while they trained."""
    examples: int
    """Rows trained on by all workers together."""
    rounds: int
    """Averaging rounds in the epoch."""
    seconds: float
    """Wall-clock seconds since the end of the previous epoch; where workers went on from a round in
    the middle of it, without those between that round and when they went on."""
    workers: int = 0
    """Number of workers; 0 in histories of versions that did not record it."""
    validation_loss: float | None = None
    """Mean loss over the held-out rows with the epoch's final parameters; None without such."""
    validation_examples: int = 0
    """Held-out rows of all workers together."""
    mean_staleness: float = 0.0
    """Mean staleness of the epoch's contributions: how often others had updated the center."""
    max_staleness: int = 0
    """The largest staleness; both are 0 where every worker takes part in every round."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What the strategy had measured by the end of the epoch, by name: the mean over the workers
    that measured it."""
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    """The metrics' values on the held-out rows with the same parameters, by name."""

    @property
    def examples_per_second(self) -> float:
        """Rows per second of all workers together."""
        return self.examples / self.seconds if self.seconds > 0 else float("inf")


def summarize_epoch(
    epoch: int, sums: Iterable[WindowSums], rounds: int, seconds: float, workers: int
) -> EpochSummary:
    """Add up what the workers reported about one epoch.

    Args:
        epoch: epoch counted from 1.
        sums: each worker's, in any order.
        rounds: averaging rounds in the epoch.
        seconds: wall-clock duration of the epoch.
        workers: their number.
    """
    # Sorted, because floating-point sums would otherwise depend on the order of arrival.
    ordered = sorted(sums, key=lambda each: each.rank)
    divisor = sum(each.divisor for each in ordered)
    loss_sum = sum(each.loss_sum for each in ordered)
    contributions = sum(each.contributions for each in ordered)
    measured: dict[str, list[float]] = {}
    for each in ordered:
        for name, value in each.measured.items():
            measured.setdefault(name, []).append(value)
    return EpochSummary(
        epoch=epoch,
        loss=loss_sum / divisor if divisor else float("nan"),
        examples=sum(each.examples for each in ordered),
        rounds=rounds,
        seconds=seconds,
        workers=workers,
        mean_staleness=sum(each.staleness for each in ordered) / max(contributions, 1),
        max_staleness=max((each.max_staleness for each in ordered), default=0),
        measured={name: sum(each) / len(each) for name, each in measured.items()},
    )


def with_validation(summary: EpochSummary, reports: Iterable[ValidationReport]) -> EpochSummary:
    """Add to an epoch what the workers found on their held-out rows.

    Args:
        summary: the epoch's summary.
        reports: the workers' reports, of any epochs, in any order.
    """
    found = sorted((r for r in reports if r.epoch == summary.epoch), key=lambda r: r.rank)
    weight = sum(report.weight for report in found)
    if not weight:
        return summary
    return replace(
        summary,
        validation_loss=sum(report.loss_sum for report in found) / weight,
        validation_examples=sum(report.examples for report in found),
    )
