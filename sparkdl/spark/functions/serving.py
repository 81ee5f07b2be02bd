"""Serving the workers of ``sparkdl.run`` until they finish: in the driver, or beside rank 0."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from sparkdl.errors import DataError, DeadlineError
from sparkdl.feed.statistics.shards import NO_ROWS
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.diagnostics.run_client import JOIN_S
from sparkdl.spark.diagnostics.run_service import OnReport, RunService, named
from sparkdl.spark.launch.answers import (
    Told,
    described,
    header_of,
    pieces,
    restored,
    show_told,
    understood,
)
from sparkdl.spark.launch.beside import FirstTask, RunInStage
from sparkdl.transport.service import Service

logger = logging.getLogger(__name__)

RESULTS_S = 120.0
"""Seconds for Spark to deliver what the workers returned, once all of them have finished."""
RETURNED_S = 10.0
"""Seconds after which to report that some workers have returned and others have not."""


@dataclass(frozen=True, kw_only=True)
class ServedCall:
    """Serves the workers in the first task; see ``launch.beside.Serve``.

    Attributes:
        num_workers: how many.
        tls: whether connections are encrypted.
        reports: whether the caller wants the workers' reports, which are shown otherwise.
    """

    num_workers: int
    tls: bool
    reports: bool

    def __call__(self, first: FirstTask) -> Iterator[bytes]:
        """Serve them; yields a header, without what they return."""
        told, header = Told(), dict[str, Any]()
        reports: list[tuple[int, dict[str, float]]] = []

        def note(rank: int, metrics: Mapping[str, float]) -> None:
            reports.append((rank, dict(metrics)))

        with told.noted():
            try:
                with (
                    Service(first.host, advertised_host=first.host, encrypted=self.tls) as opened,
                    RunService(
                        opened, self.num_workers, told.show, note if self.reports else None
                    ) as service,
                    first.workers(service.address, service.fail),
                ):
                    watch(service, None)
            except Exception as error:
                header["error"] = described(error)
        yield from pieces(header | told.header | {"reports": reports})


def results_of(run: RunInStage, num_workers: int, on_report: OnReport | None) -> list[Any]:
    """What the workers of a run of Spark Connect return, by rank.

    What they print and report is shown once they have finished.

    Args:
        run: theirs, served by a ``ServedCall``.
        num_workers: how many.
        on_report: see ``run``.

    Raises:
        SparkDLError: whatever ended the run.
    """
    with contextlib.closing(run.answered(RESULTS_S)) as answer:  # type: ignore[type-var]
        header = header_of(answer)
        if header is None:  # Spark starts no task for what turns out empty while it plans
            raise DataError(NO_ROWS)
        show_told(header)
        with understood():
            reports = [(int(rank), dict(metrics)) for rank, metrics in header["reports"]]
        if on_report is not None:
            for rank, metrics in reports:
                on_report(rank, metrics)
        if "error" in header:
            raise restored(header["error"])
        for _ in answer:  # nothing more: the ranks' results arrive
            pass
    delivered = (run.results.get(rank) for rank in range(num_workers))
    results = [each for each in delivered if each is not None]
    if len(results) < num_workers:
        raise _undelivered(num_workers)
    return list(map(cloudpickle.loads, results))


def _undelivered(num_workers: int) -> DeadlineError:
    return DeadlineError(
        f"all {num_workers} workers have finished, but Spark's job did not "
        f"deliver what they returned within {RESULTS_S:g} s. Is it very large? "
        "Write it to a file and return its path. Spark's UI shows which tasks are "
        "left"
    )


def watch(service: RunService, jobs: RunJobs | None) -> None:
    """Show what the workers print and report until all have finished, or one has failed.

    Args:
        service: the one that the workers are connected to.
        jobs: those that run them; None beside rank 0, where what they return is delivered later.

    Raises:
        DeadlineError: workers did not start, or what they returned did not arrive.
        SparkDLError: whatever ended the run.
    """
    results_due: float | None = None
    tell_of_returned = True
    while True:
        if service.show_next(0.2) and not service.missing:
            continue
        if tell_of_returned and (behind := _left_behind(service)):
            logger.warning("%s", behind)
            tell_of_returned = False
        elif service.failure is not None:
            raise service.failure
        elif service.all_finished:
            if jobs is None or jobs.ended:
                return
            results_due = results_due or time.monotonic() + RESULTS_S
            if time.monotonic() > results_due:
                raise _undelivered(service.world_size or 0)
        elif service.late:
            service.fail(
                DeadlineError(
                    f"rank {', '.join(map(str, service.missing))} of {service.world_size} workers "
                    f"did not start within {JOIN_S:g} s, and they need a gang-scheduled start: are "
                    "other jobs using the cluster? An executor that cannot reach the driver says "
                    "so in its log"
                )
            )


def _left_behind(service: RunService) -> str:
    """Which ranks still run long after others have returned, and where; empty if none do."""
    returned, running = service.left_behind(RETURNED_S)
    tops = service.stacks.tops(running) if running else {}
    if not tops:
        return ""
    where = "; ".join(f"{named([rank])} is still running, in {top}" for rank, top in tops.items())
    return f"{named(returned)} already returned; {where}"
