"""Run the workers of one fit as one Spark job, in the background while the driver runs rounds."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch
from pyspark import cloudpickle as spark_cloudpickle

from sparkdl.averager.service.server import Averager
from sparkdl.driver import Launch
from sparkdl.errors import (
    DataError,
    DisconnectedError,
    ModelError,
    SetupError,
    SparkDLError,
    TrainingError,
    WorkerLostError,
)
from sparkdl.feed.statistics.shards import NO_ROWS
from sparkdl.spark.catalyst.jvm import end_of_jvm
from sparkdl.spark.closures.pickling import References, pickled
from sparkdl.spark.cluster.gpus import gpu_profile
from sparkdl.spark.cluster.run_jobs import JOB_END_S, RunJobs
from sparkdl.spark.cluster.slots import require_free_slots
from sparkdl.spark.diagnostics.console import Console, display, echoes
from sparkdl.spark.diagnostics.task_failures import is_loss, memory_advice, with_sparks_reason
from sparkdl.spark.diagnostics.watchdog import watched
from sparkdl.spark.launch import bootstrap
from sparkdl.spark.launch.task import OUTPUT_DDL
from sparkdl.spark.launch.worker_rows import (
    Task,
    Workers,
    names_others,
    run_on_rows,
    with_original_places,
)
from sparkdl.spark.modules.arrival import Shipment
from sparkdl.spark.modules.shipping import ship
from sparkdl.spark.session.encryption import keeps_rows_in_memory
from sparkdl.user_code.tracebacks import TRACEBACK_CHARACTERS, shortened
from sparkdl.version import __version__
from sparkdl.worker import Job

logger = logging.getLogger(__name__)

LEAVE_S = 2.0
"""Seconds that workers have to leave on their own after a failure, before they are killed."""
REASON_S = 10.0
"""Seconds for Spark to say how a lost worker's process ended."""

_NEEDED_BY_PYSPARK = re.compile(
    r"No module named '(?:pyarrow|pandas|numpy)'|(?:PyArrow|Pandas) >= [\d.]+ must be installed"
)
"""How PySpark words it when a package is missing before our own code can check."""

_NO_PYTHON = re.compile(
    r'Cannot run program "(?P<path>[^"]+)": error=\d+, (?P<why>[^\n]+)\n'
    r"(?:\s+at java[^\n]*\n)*\s+at org\.apache\.spark\.api\.python\.PythonWorkerFactory"
)
"""How a task fails when its executor finds no interpreter to start."""
_PLACE = re.compile(r"\((\S+) executor \w+\)")

_UNREACHABLE = re.compile(
    rf"{DisconnectedError.__module__}\.{DisconnectedError.__qualname__}: (rank \d+ cannot reach .*)"
)
"""How a task fails that could never reach the driver."""

# The functions of that module must run on executors that cannot import it.
spark_cloudpickle.register_pickle_by_value(bootstrap)  # type: ignore[no-untyped-call]


def launch(workers: Workers, job: Job) -> Launch:
    """Prepare to start ``job`` on ``workers``; see ``driver.Launch``."""
    spark = workers.frame.sparkSession
    context = spark.sparkContext
    jobs = RunJobs(context, workers.description)
    barrier = job.strategy.needs.gang_start
    used = References()
    payload = pickled((job, workers.network, keeps_rows_in_memory(spark, workers.store_in)), used)
    # The driver builds the initial model in a process of its own, which imports the files.
    shipment = ship(used.names, context, refuse_edited=True) if workers.ship_modules else None

    @contextmanager
    def start(averager: Averager) -> Iterator[None]:
        with (
            Console(averager.service, display(spark)) as console,
            run_workers(averager),
            watched(averager, console.stacks, context, jobs, workers.num_tasks),
        ):
            yield

    @contextmanager
    def run_workers(averager: Averager) -> Iterator[None]:
        arguments = (payload, astuple(averager.address), workers.device, echoes(spark))
        task = rank_task(
            "sparkdl.spark.launch.task:run_worker_task",
            arguments,
            workers.ranks_a_task,
            shipment,
            used,
        )
        if barrier:
            profile = gpu_profile(spark, workers.device)
            require_free_slots(spark, workers.num_tasks, profile, workers.ranks_a_task)

        def run_job() -> None:
            if not run_on_rows(workers, job.seed, task, OUTPUT_DDL, barrier=barrier):
                # Spark starts no task for what turns out empty while it plans or shuffles.
                averager.fail(DataError(NO_ROWS))
            # Dropped if every worker has finished, as it should be.
            averager.fail(
                TrainingError(
                    "the Spark job ended before training did: a worker exited without "
                    "reporting why, perhaps because it could not reach the driver at "
                    f"{averager.address.uri}"
                )
            )

        def failed(error: Exception) -> None:
            """Whatever ends the Spark job ends the run."""
            ends.append(as_training_error(error))
            averager.fail(ends[0])

        ends: list[SparkDLError] = []
        try:
            jobs.start(run_job, failed)
            yield
        except SparkDLError as error:
            # Workers that wait for a round learn of the failure and leave on their own; killing
            # them would cost the session its warm Python processes.
            jobs.wait(LEAVE_S)
            if isinstance(error, DataError | ModelError) and names_others(str(error), workers):
                jobs.end()
                error.args = (with_original_places(str(error), workers, job.seed, jobs),)
            if isinstance(error, WorkerLostError):
                known = with_sparks_reason(error, spark, jobs.group, workers.ranks_a_task)
                if known is not None:
                    jobs.wait(REASON_S)  # a task has failed, so the job is about to
                if ends and is_its_own(ends[0]):
                    raise ends[0] from error
                if known is not None:
                    raise known from error
            raise
        except BaseException:
            jobs.cancel()
            raise
        else:
            jobs.wait(JOB_END_S)
        finally:
            jobs.end()

    return start


def rank_task(
    entry: str,
    arguments: tuple[Any, ...],
    ranks_a_task: int,
    shipment: Shipment | None,
    used: References,
    *,
    apart: bool = False,
) -> Task:
    """The task that runs a worker's function for each of its ranks.

    Args:
        entry: ``module:function``; see ``assignment.run_ranks``.
        arguments: plain values.
        ranks_a_task: ranks per task.
        shipment: the user's own modules that the function needs.
        used: what the pickles among the arguments refer to.
        apart: whether the only rank of a task gets a process of its own too.
    """
    # A plain str: torch's own version type cannot be unpickled where torch is missing.
    versions = {"torch": str(torch.__version__)}
    return bootstrap.make_task(
        "sparkdl.spark.launch.assignment:run_ranks",
        (
            entry,
            arguments,
            ranks_a_task,
            apart,
            shipment and shipment.plain(),
            used.broadcasts,
            versions,
        ),
        {"sparkdl": __version__},
    )


def as_training_error(error: Exception) -> SparkDLError:
    """Say why the Spark job failed, in our bootstrap's own words if the bootstrap refused."""
    if isinstance(error, SparkDLError):
        return error
    if ended := end_of_jvm(error):
        return TrainingError(ended)
    text = str(error)
    start = text.find(bootstrap.MARKER)
    if start >= 0:
        return SetupError(text[start:].splitlines()[0])
    if lacking := _NEEDED_BY_PYSPARK.search(text):
        return SetupError(
            f"the Python on the executors lacks what PySpark itself needs: {lacking[0]}. The "
            f"driver's Python is {sys.executable}: point PYSPARK_PYTHON at one like it before "
            "the session is created (sparkdl.create_session does), or install the driver's "
            "packages there"
        )
    if absent := _NO_PYTHON.search(text):
        place = _PLACE.search(text)
        return SetupError(_no_python(absent["path"], absent["why"], place and place[1]))
    if unreachable := _UNREACHABLE.search(text):
        return TrainingError(
            f"{unreachable[1].strip()}. Executors must reach the driver on a port that it "
            "chooses for each run: is spark.driver.host an address of this machine that they "
            "can reach, and is there a firewall in between?"
        )
    message = f"the Spark job that runs the workers failed: {shortened(text, TRACEBACK_CHARACTERS)}"
    if is_loss(text):
        advice = memory_advice(text)
        return WorkerLostError(f"{message}\n{advice}" if advice else message)
    return TrainingError(message)


def is_its_own(error: SparkDLError) -> bool:
    """Whether a Spark job failed by itself, so that workers were lost because of it.

    Args:
        error: from ``as_training_error``.
    """
    of_workers = isinstance(error, WorkerLostError) or DisconnectedError.__qualname__ in str(error)
    return not of_workers


def _no_python(path: str, why: str, host: str | None) -> str:
    where = "an executor" if host is None else f"the executor on {host}"
    told = f"{where} cannot start the Python that PYSPARK_PYTHON names, {path}: {why}. "
    if "/" not in path:
        return told + "It is not on the PATH there: set PYSPARK_PYTHON to an absolute path"
    if path.startswith("/"):
        return told + "Install it on every host, or set PYSPARK_PYTHON to a path that all have"
    folder, _, rest = path.removeprefix("./").partition("/")
    return told + (
        "The path is relative, so spark.archives must provide it: does that setting end in "
        f"#{folder}, and does the archive have {rest}? If so, it may link to a Python that the "
        "host lacks: venv-pack packs a link to the one the environment was created with, which "
        "every host then needs at the same path; conda-pack packs Python itself"
    )
