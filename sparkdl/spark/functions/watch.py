"""The driver's wait for a function's workers, and what it shows meanwhile."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping

from sparkdl.errors import DeadlineError
from sparkdl.spark.diagnostics.console import Display
from sparkdl.spark.diagnostics.messages import Lines, Report, named
from sparkdl.spark.diagnostics.run_client import JOIN_S
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.functions.job import Job

logger = logging.getLogger(__name__)

RESULTS_S = 120.0
"""Seconds for Spark to deliver what the workers returned, once all of them have finished."""
RETURNED_S = 10.0
"""Seconds after which to report that some workers have returned and others have not."""

OnReport = Callable[[int, Mapping[str, float]], None]
"""(rank, numbers by name)."""


def watch(
    service: RunService, job: Job, display: Display, on_report: OnReport | None = None
) -> None:
    """Show what the workers print and report until all have finished, or one has failed.

    Args:
        service: the one that the workers are connected to.
        job: the one that runs them.
        display: shows what they print.
        on_report: called with what they report; by default that is shown too.

    Raises:
        DeadlineError: workers did not start, or what they returned did not arrive.
        SparkDLError: whatever ended the run.
    """
    deadline = time.monotonic() + JOIN_S
    results_due: float | None = None
    tell_of_returned = True
    while True:
        try:
            event = service.events.get(timeout=0.2)
        except queue.Empty:
            event = None
        if isinstance(event, Lines):
            display(event.rank, event.lines, event.left_out)
        elif isinstance(event, Report):
            if on_report is not None:
                on_report(event.rank, event.metrics)
            else:
                display(event.rank, [shown_report(event.metrics)], 0)
        elif tell_of_returned and (behind := _left_behind(service)):
            logger.warning("%s", behind)
            tell_of_returned = False
        elif service.failure is not None:
            raise service.failure
        elif service.all_finished:
            if job.ended:
                return
            results_due = results_due or time.monotonic() + RESULTS_S
            if time.monotonic() > results_due:
                raise DeadlineError(
                    f"all {service.world_size} workers have finished, but Spark's job did not "
                    f"deliver what they returned within {RESULTS_S:g} s. Is it very large? "
                    "Write it to a file and return its path. Spark's UI shows which tasks are "
                    "left"
                )
        elif service.missing and job.makes_rows:
            deadline = time.monotonic() + JOIN_S
        elif service.missing and time.monotonic() > deadline:
            raise DeadlineError(
                f"rank {', '.join(map(str, service.missing))} of {service.world_size} workers did "
                f"not start within {JOIN_S:g} s, and they need a gang-scheduled start: are other "
                "jobs using the cluster? An executor that cannot reach the driver says so in its "
                "log"
            )


def _left_behind(service: RunService) -> str:
    """Which ranks still run long after others have returned, and where; empty if none do."""
    returned, running = service.left_behind(RETURNED_S)
    tops = service.stacks.tops(running) if running else {}
    if not tops:
        return ""
    where = "; ".join(f"{named([rank])} is still running, in {top}" for rank, top in tops.items())
    return f"{named(returned)} already returned; {where}"


def shown_report(metrics: Mapping[str, float]) -> str:
    """A line with what a worker has reported.

    Args:
        metrics: numbers by name.
    """
    return ", ".join(f"{name} {value:g}" for name, value in metrics.items())
