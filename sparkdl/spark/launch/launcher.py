"""Run workers as one Spark job, in the background while the driver serves them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, astuple, dataclass, field, replace
from functools import partial

from pyspark.sql import Row, SparkSession
from typing_extensions import Self

from sparkdl.arguments import counted
from sparkdl.averager.service.server import Averager
from sparkdl.driver import Launch
from sparkdl.errors import (
    DataError,
    DisconnectedError,
    SparkDLError,
    TrainingError,
    WorkerLostError,
)
from sparkdl.feed.shards import NO_ROWS
from sparkdl.spark.arrival import Shipment
from sparkdl.spark.catalyst.jvm import Py4JError, end_of_jvm, is_stopped
from sparkdl.spark.cluster.run_jobs import JOB_END_S, RunJobs
from sparkdl.spark.cluster.slots import require_free_slots
from sparkdl.spark.diagnostics.console import display, echoes
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.diagnostics.task_failures import (
    end_of_a_rank,
    host_of_last_failure,
    is_loss,
    memory_advice,
    with_sparks_reason,
)
from sparkdl.spark.diagnostics.watchdog import watched
from sparkdl.spark.launch.environments import setup_error, task_of
from sparkdl.spark.launch.spare_tasks import SpareTasks
from sparkdl.spark.launch.worker_rows import Task, Workers, run_tasks
from sparkdl.spark.sending import ISOLATION, lent
from sparkdl.spark.shipping import ship
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.user_code.needed_modules import pickled
from sparkdl.user_code.tracebacks import TRACEBACK_CHARACTERS, shortened
from sparkdl.worker import Job

LEAVE_S = 2.0
"""Seconds that workers have to leave on their own after a failure, before they are killed."""
REASON_S = 10.0
"""Seconds for Spark to say how a lost worker's process ended."""

_UNREACHABLE = re.compile(
    rf"{DisconnectedError.__module__}\.{DisconnectedError.__qualname__}: (rank \d+ cannot reach .*)"
)
"""How a task fails that could never reach the driver."""

_SESSION_GONE = "INVALID_HANDLE.SESSION_"
_FILE_GONE = re.compile(r"Stream '/artifacts/\S+' was not found")
"""How a task fails that is to fetch a file which a Connect session has sent to its server.

None of ours is lost in this way, see ``sending``; users' own may be.
"""
_STOPPED = (
    "the Spark session was stopped while its job ran the workers: by spark.stop(), in another "
    "thread or a callback, or because the cluster ended the application, as the driver's log then "
    "says. Run this again in another session (sparkdl.create_session()): a fit with checkpointPath "
    "goes on from its last checkpoint"
)


def launch(workers: Workers, job: Job, spares: SpareTasks | None = None) -> Launch:
    """Prepare to start a job on workers; see ``driver.Launch``.

    Args:
        workers: where they run, and on which rows.
        job: what they train.
        spares: tasks that wait for workers to be added, if their number may change.
    """
    spark, names = workers.frame.sparkSession, set[str]()
    sent = (job, workers.network, workers.in_memory, workers.device, echoes(spark))
    payload = pickled(sent, names)
    shipment = ship(names, spark) if workers.ship_modules else None

    @contextmanager
    def start(averager: Averager) -> Iterator[None]:
        number, mine = averager.world_size, workers
        if number != workers.num_workers:
            before, now = (f" on {counted(n, 'worker')}" for n in (workers.num_workers, number))
            told = workers.description.replace(before, now, 1)
            mine = replace(workers, num_workers=number, description=told)
        running = WorkerJob(
            mine,
            payload,
            "sparkdl.spark.launch.task:run_worker_task",
            averager.address,
            shipment,
            averager.fail,
            ended_early="the Spark job ended before training did: a worker exited without "
            "reporting why, perhaps because it could not reach the driver at "
            f"{averager.address.uri}",
            all_there=lambda: len(averager.there) == number,
        )
        if job.strategy.needs.collective:
            require_free_slots(spark, mine.num_tasks, mine.profile, mine.ranks_a_task)
        with (
            RunService(averager, None, display(spark)) as console,
            running,
            watched(averager, console.stacks, running.jobs, spark.sparkContext, mine.num_tasks),
            nullcontext() if spares is None else spares.waiting(averager),
        ):
            yield

    return start


@dataclass(eq=False, repr=False)
class WorkerJob:
    """The Spark job in whose tasks the workers of one run are; a context manager that ends it.

    An error that leaves the context says what Spark knows of lost workers.

    Attributes:
        workers: the Spark side of the run.
        payload: for the tasks.
        entry: ``module:function``; see ``assignment.run_ranks``.
        address: what serves the workers: the function's argument after the payload.
        shipment: the user's own modules.
        fail: ends the run. It is told of whatever ends the job; what comes after the run's own end
            is dropped there.
        apart: whether the only rank of a task gets a process of its own too.
        ended_early: why the run fails if its job ends while workers are still there.
        unexplained: what is said of a lost worker of which Spark knows nothing.
        all_there: whether every task has a worker, so that the job will end by itself.
        jobs: this one, and those of what is upstream.
    """

    workers: Workers
    payload: bytes
    entry: str
    address: ServiceAddress
    shipment: Shipment | None
    fail: Callable[[SparkDLError], None]
    _: KW_ONLY
    apart: bool = False
    ended_early: str
    unexplained: str = ""
    all_there: Callable[[], bool] = lambda: True
    _yielded: list[Row] = field(default_factory=list, init=False)
    _error: SparkDLError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._spark = self.workers.frame.sparkSession
        self.jobs = RunJobs(self._spark.sparkContext, self.workers.description)

    def __enter__(self) -> Self:
        with ExitStack() as held:
            payload = held.enter_context(lent(self._spark, self.payload))
            name, told = "sparkdl.spark.launch.assignment:run_ranks", (astuple(self.address),)
            ranks, modules = self.workers.ranks_a_task, self.shipment and tuple(self.shipment)
            task = task_of(name, self.entry, payload, told, ranks, self.apart, modules)
            held.callback(self.jobs.end)
            self.jobs.start(partial(self._run, task), self._failed)
            self._held = held.pop_all()  # unless there was an interrupt, for example
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        try:
            if isinstance(error, SparkDLError):
                # Workers that wait for a round learn of the failure and leave on their own; killing
                # them would cost the session its warm Python processes.
                self.jobs.wait(LEAVE_S)
                known = self._explained(error)
                if known is not error:
                    raise known from error
            elif error is None:
                self.jobs.wait(JOB_END_S if self.all_there() else LEAVE_S)
        finally:
            self._held.close()

    def yielded(self) -> list[Row]:
        """What the tasks have yielded, by rank, once the job has ended.

        Raises:
            TrainingError: it was lost on the way.
        """
        if self._error is not None:
            raise self._error
        return sorted(self._yielded, key=lambda row: row.rank)

    def _run(self, task: Task) -> None:
        self._yielded = run_tasks(self.workers, task, lambda frame: frame.collect())
        if not self._yielded:
            # Spark starts no task for what turns out empty while it plans or shuffles.
            self.fail(DataError(NO_ROWS))
        self.fail(TrainingError(self.ended_early))

    def _failed(self, error: Exception) -> None:
        host = partial(host_of_last_failure, self.jobs)
        self._error = as_training_error(error, host, self._spark)
        self.fail(self._error)

    def _explained(self, error: SparkDLError) -> SparkDLError:
        """The error with what Spark knows about lost workers."""
        if not isinstance(error, WorkerLostError) or error is self._error:
            return error
        if self._sparks_reason(error) is not None:
            self.jobs.wait(REASON_S)  # a task has failed, so the job is about to
        if self._error is not None and is_its_own(self._error):
            return self._error
        if end := end_of_a_rank(str(self._error)):
            return WorkerLostError(f"{error}: {end}", ranks=error.ranks)
        if known := self._sparks_reason(error):
            return known
        return WorkerLostError(f"{error}{self.unexplained}", ranks=error.ranks)

    def _sparks_reason(self, error: WorkerLostError) -> WorkerLostError | None:
        return with_sparks_reason(error, self.jobs, self.workers.ranks_a_task)


def as_training_error(
    error: Exception,
    host: Callable[[], str | None] = lambda: None,
    spark: SparkSession | None = None,
) -> SparkDLError:
    """Say why the Spark job failed, in our bootstrap's own words if the bootstrap refused.

    Args:
        error: what the job raised.
        host: finds out where a task of it failed.
        spark: the session, if it is this process's own.
    """
    if isinstance(error, SparkDLError):
        return error
    if ended := end_of_jvm(error):
        return TrainingError(ended)
    with suppress(Py4JError, OSError, AttributeError):  # a vendor's Spark may lack a private name
        if spark is not None and is_stopped(spark):  # of which Spark says little, or nonsense
            return TrainingError(_STOPPED)
    text = str(error)
    if differing := setup_error(text, host):
        return differing
    if gone := _FILE_GONE.search(text):
        return TrainingError(
            "the Spark Connect server no longer has a file that a session had sent to it: "
            f"{gone[0]}. With {ISOLATION}=false it shares such files among its sessions, and when "
            "one of those ends, or a frame that it had cached is dropped, all others' jobs fail. "
            f"Restart the server with {ISOLATION}=true, as sbin/start-connect-server.sh does"
        )
    if _SESSION_GONE in text:
        return TrainingError(
            f"the Spark Connect server no longer has this session ({shortened(text, 200)}): it was "
            "restarted, or has closed the session. Call the session's stop(), create another with "
            "sparkdl.create_session(), and read the rows again in it"
        )
    if unreachable := _UNREACHABLE.search(text):
        return TrainingError(
            f"{unreachable[1].strip()}. Executors must reach the driver on a port that it "
            "opens for each run: is spark.driver.host an address of this machine that they "
            "can reach, and is there a firewall in between? Let a port through it, and set "
            "spark.sparkdl.driver.port to that (40000, or a range: 40000-40010)"
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
