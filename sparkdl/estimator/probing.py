"""``sparkdl.plan``: a plan from short fits on a few rows, before a training is paid for."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.arguments import require_positive
from sparkdl.callbacks import Callback, Training
from sparkdl.errors import ConfigError
from sparkdl.estimator.estimator import BaseEstimator
from sparkdl.events import EpochSummary
from sparkdl.planner.links import Link
from sparkdl.planner.plan import WORKERS, Plan
from sparkdl.spark.cluster.slots import gpu_profile, most_slots, ranks_a_task
from sparkdl.spark.required import require_frame

logger = logging.getLogger(__name__)

LEFT_OUT = (
    "callbacks",
    "checkpointPath",
    "metrics",
    "schedulerMetric",
    "validationFraction",
    "validationIndicatorCol",
)
"""Params that a probe does without: it neither validates nor leaves anything behind."""
EPOCHS = 50
"""The most that a probe takes; it ends when its time is over."""
MOST_STEPS = 200
"""Of a probe's epoch."""


def plan(
    estimator: BaseEstimator[Any],
    df: DataFrame,
    *,
    workers: Sequence[int] = WORKERS,
    link: str | float | Link | None = None,
    measured_on: str | float | Link | None = None,
    seconds: float = 60.0,
) -> Plan:
    """Predict what an epoch takes with other numbers of workers, from probes on a few rows.

    The probes are fits on the first rows with 1 and 2 workers, with 1 worker and minibatches four
    times as large, and with 2 workers that average in the other place, the driver or among
    themselves, if the strategy can; they validate nothing, and leave nothing behind.

    Args:
        estimator: what is to be trained, and how.
        df: all rows, which are counted.
        workers: the numbers of workers to plan for.
        link: what connects the hosts to plan for, such as ``"1 Gbit/s"``; None for this cluster.
        measured_on: what connects this cluster's, to be given with ``link`` unless it is much
            faster.
        seconds: how long the probes may train in total, beside their starts. A probe takes at least
            two epochs of one window.

    Raises:
        ConfigError: there are too few rows for two epochs of a window, or what is given cannot be
            planned for.
        SparkDLError: the estimator cannot be fitted to the rows.
    """
    require_frame(df, to_end="Plan with")
    seconds = require_positive("seconds", seconds)
    held_out = estimator.held_out_by()
    trained = df.where(~df[held_out]) if isinstance(held_out, str) else df
    fraction = held_out if isinstance(held_out, float) else 0.0
    rows = round(trained.count() * (1 - fraction))
    if not rows:
        raise ConfigError("there are no rows to plan with")
    spark, device = df.sparkSession, estimator.getDevice()
    unit = ranks_a_task(spark, device)
    slots = most_slots(spark, gpu_profile(spark, device))
    size, period = estimator.getBatchSize(), getattr(estimator.getStrategy(), "period", 1)
    window = period if isinstance(period, int) else 1

    def probe(
        given: BaseEstimator[Any], workers: int, size: int, steps: int, seconds: float
    ) -> Any:
        """Fit a copy to the first rows for a while, and for two epochs in any case."""
        taken, size = min(rows, steps * workers * size), min(size, math.ceil(rows / workers))
        short = given.copy({"numWorkers": workers, "batchSize": size})
        for name in LEFT_OUT:
            short.clear(short.getParam(name))
        short = short.copy({"epochs": EPOCHS, "progress": False, "callbacks": [_Until(seconds)]})
        began = time.monotonic()
        profile = short.fit(trained.limit(taken)).summary.profile
        took = time.monotonic() - began
        logger.info("a probe with %d workers and %d rows took %.1f s", workers, taken, took)
        return profile

    first = probe(estimator, unit, size, window, 0.0)
    step = max(max(first.worker_step_s), 1e-5)
    probes = [(estimator, unit, size), (estimator, unit, 4 * size)]
    if slots >= 2:
        places = () if first.traffic is None else first.traffic.places
        elsewhere = {"driver", "executors"} & {*places} - {first.aggregation}
        others = [estimator.copy({"strategy": {"aggregation": each}}) for each in elsewhere]
        probes += [(each, 2 * unit, size) for each in (estimator, *others)]
    share = seconds / len(probes)
    windows = max(1, min(MOST_STEPS, int(share / 4 / step)) // window)
    profiles = [probe(*each, windows * window, share) for each in probes]
    return Plan(profiles, link=link, measured_on=measured_on, workers=workers, rows=rows)


class _Until(Callback):
    """Ends a training when its time is over, and at least two epochs are."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Look at the clock."""
        if len(training.history) > 1 and time.monotonic() - training.began > self._seconds:
            training.stop("the probe's time is over")
