"""The driver's part of metrics: turning all workers' counts into numbers, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.averager.messages.run_events import EpochCounted, WorkerState
from sparkdl.errors import ConfigError, TrainingError
from sparkdl.events import MetricValue
from sparkdl.metrics import Metrics
from sparkdl.worker import Job

MAX_NUMBERS = 10_000
"""The most per epoch: they are in the history, and so in every checkpoint."""
HOLD_OUT = (
    "metrics are measured on held-out rows, but there are none: set validationFraction, or name a "
    "column that marks them (validationIndicatorCol)"
)
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Measuring:
    """Computes the metrics of each epoch of one run.

    Attributes:
        metrics: the metrics to compute.
        followed: the one that the learning rate follows; None if it follows none.
        higher_is_better: for each metric, whether larger is better; None if it does not say.
    """

    metrics: Metrics
    followed: str | None
    higher_is_better: Mapping[str, bool | None]

    @classmethod
    def of(cls, job: Job, mode: str | None) -> Measuring | None:
        """The ``Measuring`` of a job; None if it has no metrics.

        Args:
            job: what the workers train.
            mode: the schedule's ``mode``, if it follows a metric or the loss.

        Raises:
            ConfigError: the metrics have no rows, or the schedule cannot follow its metric.
        """
        if job.metrics is not None and job.schema.validation is None:
            raise ConfigError(HOLD_OUT)
        known = {} if job.metrics is None else job.metrics.higher_is_better()
        if job.scheduler_metric is not None:
            _require_followed(job.scheduler_metric, known, mode)
        return None if job.metrics is None else cls(job.metrics, job.scheduler_metric, known)

    def __call__(self, counted: EpochCounted) -> dict[str, MetricValue]:
        """Compute the metrics of an epoch.

        Raises:
            ModelError: a metric cannot be computed.
            ConfigError: one has too many numbers to keep, or is followed by the learning rate but
                not one number.
            TrainingError: a worker did not send its counts.
        """
        epoch = counted.epoch
        states = [_octets(rank, kept) for rank, kept in enumerate(counted.states)]
        values = self.metrics.measure(states)
        for name, value in values.items():
            if (numbers := _numbers(value)) > MAX_NUMBERS:
                raise ConfigError(
                    f"metric '{name}' has {numbers} values after epoch {epoch}, but the history "
                    f"takes at most {MAX_NUMBERS}. Curves have fewer with thresholds=200; or "
                    "measure it once, with model.evaluate(df, metrics)"
                )
        if self.followed is not None and not isinstance(values[self.followed], float):
            raise ConfigError(
                f"schedulerMetric='{self.followed}' came to {values[self.followed]!r:.80} after "
                f"epoch {epoch}; the scheduler can follow only a metric with a single value"
            )
        return values


def _require_followed(name: str, known: Mapping[str, bool | None], mode: str | None) -> None:
    """Check that the metric for the learning rate to follow is measured, and really followed.

    Args:
        name: the metric's name.
        known: for each metric, whether a larger value is better; None if it does not say.
        mode: what the schedule takes to be better; None if it follows nothing.

    Raises:
        ConfigError: it is not measured, not followed, or better in the other direction.
    """
    if name not in known:
        raise ConfigError(
            f"schedulerMetric is {name!r}, which is not one of the metrics "
            f"({', '.join(known) or 'there are none: set metrics'})"
        )
    if mode is None:
        raise ConfigError(
            f"schedulerMetric is {name!r}, but the scheduler follows no metric. Set "
            "scheduler=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, ...), or leave "
            "schedulerMetric out"
        )
    higher = known[name]
    if higher is not None and higher != (mode == "max"):
        raise ConfigError(
            f"a {'larger' if higher else 'smaller'} {name} is better, but the scheduler has "
            f"mode='{mode}': set partial(ReduceLROnPlateau, mode='{'max' if higher else 'min'}', "
            "...)"
        )


def _octets(rank: int, kept: WorkerState | None) -> bytes:
    if kept is None:
        raise TrainingError(f"rank {rank} has not sent its metrics' states")
    return b"".join(kept.blocks(_BLOCK))


def _numbers(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_numbers, value)) if isinstance(value, list) else 1
