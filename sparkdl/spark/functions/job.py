"""The Spark job that runs a function on every worker, and the driver's wait for it."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple
from inspect import signature
from pathlib import Path
from typing import Any

import cloudpickle
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from sparkdl.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    SparkDLError,
    TrainingError,
    WorkerLostError,
)
from sparkdl.feed.statistics.shards import NO_ROWS
from sparkdl.spark.closures.pickling import References, pickled_or_refused
from sparkdl.spark.cluster.gpus import gpu_profile, ranks_a_task
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.diagnostics.console import Display
from sparkdl.spark.diagnostics.messages import Lines, Report, named
from sparkdl.spark.diagnostics.run_client import JOIN_S
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.diagnostics.task_failures import end_of_a_rank, with_sparks_reason
from sparkdl.spark.functions.program import Script
from sparkdl.spark.functions.rows import Rows
from sparkdl.spark.functions.task import OUTPUT_DDL, Call, Placement
from sparkdl.spark.launch.launcher import as_training_error, is_its_own, rank_task
from sparkdl.spark.launch.worker_rows import names_others, run_on_rows, with_original_places
from sparkdl.spark.modules.shipping import ship

logger = logging.getLogger(__name__)


class Job:
    """The Spark job that runs the workers, in a thread of its own."""

    def __init__(
        self,
        spark: SparkSession,
        service: RunService,
        call: Call,
        placement: Placement,
        rows: Rows | None,
        ship_modules: bool,
    ) -> None:
        self._spark = spark
        self._profile = gpu_profile(spark, placement.device)
        self._ranks_a_task = ranks = ranks_a_task(spark, placement.device)
        self._tasks = service.world_size // ranks
        self._input = rows
        self._service = service
        self._rows: list[Any] = []
        self._error: SparkDLError | None = None
        name = getattr(call.function, "__name__", getattr(call.function, "path", "a function"))
        description = f"sparkdl: run {name} on {service.world_size} workers"
        self._jobs = RunJobs(spark.sparkContext, description)
        # The call is pickled separately: a worker may lack what it imports, which the user must be
        # told.
        feeding = None if rows is None else rows.feeding
        used = References()
        payload = cloudpickle.dumps((placement, feeding, _pickled(call, name, used)))
        shipment = None
        if ship_modules:
            script = call.function if isinstance(call.function, Script) else None
            used.names |= set() if script is None else script.imports()
            first = [] if script is None else [str(Path(script.path).parent)]
            shipment = ship(used.names, spark.sparkContext, first)
        self._task = rank_task(
            "sparkdl.spark.functions.task:run_function_task",
            (payload, astuple(service.address)),
            ranks,
            shipment,
            used,
            apart=True,
        )

    def start(self) -> None:
        """Have Spark run it."""
        self._jobs.start(self._run, self._fail)

    @property
    def ended(self) -> bool:
        """Whether Spark has ended it."""
        return self._jobs.ended

    @property
    def makes_rows(self) -> bool:
        """Whether Spark is planning or computing the rows, which may take any length of time."""
        if self._input is None:
            return False
        tracker = self._spark.sparkContext.statusTracker()
        try:
            jobs = self._jobs.infos()
            stages = [tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds]
        except (Py4JError, OSError) as error:
            logger.debug("Spark no longer answers: %s", error)
            return False
        return not jobs or any(stage.numActiveTasks for stage in stages if stage)

    def end(self, *, patience_s: float) -> None:
        """Let the workers leave by themselves, then kill them."""
        self._jobs.end(patience_s)

    def explained(self, error: SparkDLError) -> SparkDLError:
        """An error that ended the run, with what Spark knows about lost workers and rows."""
        if isinstance(error, DataError) and self._input is not None:
            workers, seed = self._input.workers, self._input.feeding.seed
            if names_others(str(error), workers):
                error.args = (with_original_places(str(error), workers, seed, self._jobs),)
            return error
        if not isinstance(error, WorkerLostError) or error is self._error:
            return error
        if self._error is not None and is_its_own(self._error):
            return self._error
        if end := end_of_a_rank(str(self._error)):
            return WorkerLostError(f"{error}: {end}")
        spark, group = self._spark, self._jobs.group
        return with_sparks_reason(error, spark, group, self._ranks_a_task) or WorkerLostError(
            f"{error}. The executor's log says why; a process killed for memory needs more "
            "spark.executor.memoryOverhead"
        )

    def results(self) -> list[Any]:
        """What the ranks returned.

        Raises:
            TrainingError: it was lost on the way.
        """
        if self._error is not None:
            raise self._error
        return [cloudpickle.loads(row.result) for row in sorted(self._rows, key=lambda r: r.rank)]

    def _run(self) -> None:
        if self._input is None:
            tasks = self._spark.range(0, self._tasks, 1, self._tasks)
            self._rows = tasks.mapInArrow(
                self._task, OUTPUT_DDL, barrier=True, profile=self._profile
            ).collect()
        else:
            workers, seed = self._input.workers, self._input.feeding.seed
            self._rows = run_on_rows(workers, seed, self._task, OUTPUT_DDL, barrier=True)
            if not self._rows:
                # Spark starts no task for a DataFrame that it finds empty while planning.
                self._service.fail(DataError(NO_ROWS))
        self._service.fail(
            TrainingError(
                "the Spark job ended before its workers did: one exited without reporting why"
            )
        )

    def _fail(self, error: Exception) -> None:
        """Whatever ends the Spark job ends the run."""
        self._error = as_training_error(error)
        self._service.fail(self._error)


def _pickled(call: Call, name: str, used: References) -> bytes:
    """Pickle what every worker runs.

    Raises:
        ConfigError: it cannot be pickled; the message names the variable or argument at fault.
    """
    parts = {name: call.function}
    with suppress(TypeError, ValueError):  # its arguments do not fit, or nobody knows them
        if not isinstance(call.function, Script):
            bound = signature(call.function).bind(*call.args, **call.kwargs)
            parts |= {f"the argument '{each}'": value for each, value in bound.arguments.items()}
    parts |= {f"the argument {index}": each for index, each in enumerate(call.args, 1)}
    parts |= {f"the argument '{each}'": value for each, value in call.kwargs.items()}
    return pickled_or_refused(call, parts, used, ConfigError)


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
