"""Watches a run from the driver: is Spark still getting to the workers, and which are stuck?"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import SparkSession

from sparkdl.averager.service.server import Averager
from sparkdl.errors import CollectiveError, DeadlineError
from sparkdl.spark.catalyst.cluster import feeds_a_shuffle
from sparkdl.spark.catalyst.core import Py4JError, SparkContext, SparkStageInfo
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.diagnostics.stacks import Stacks
from sparkdl.user_code.tracebacks import add_note

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Seconds between two checks."""
LEAVE_S = 1.0
"""Seconds within which workers that are not stuck leave."""


@contextmanager
def watched(
    averager: Averager, stacks: Stacks, jobs: RunJobs, spark: SparkSession, tasks: int
) -> Iterator[None]:
    """Watch the workers of a run while it lasts.

    The time until workers count as not started runs only while Spark does nothing for them: it
    stops while tasks run whose results they need, and starts over on progress. The stacks of a
    worker that is dropped for its silence are logged; an error that says who was waited for has
    them as a note.

    Args:
        averager: the run's averager.
        stacks: asks the workers.
        jobs: the run's jobs.
        spark: the session.
        tasks: the number of tasks in which the workers run.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_watch,
        args=(averager, stacks, spark.sparkContext, jobs, tasks, ended),
        name="sparkdl-watchdog",
        daemon=True,
    )
    thread.start()
    try:
        with stacks_on_signal(stacks):
            yield
    except (DeadlineError, CollectiveError) as error:
        # The others were told to leave: those still there are stuck.
        time.sleep(LEAVE_S)
        if told := stacks.ask():
            add_note(error, f"Workers that have not left:\n{told}")
        raise
    finally:
        ended.set()
        thread.join(10 * INTERVAL_S)


@contextmanager
def stacks_on_signal(stacks: Stacks) -> Iterator[None]:
    """On SIGUSR1 to this process, write every worker's stacks to standard error.

    The user's own handler stays; outside the main thread none can be set.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
        yield
        return

    def write() -> None:
        sys.stderr.write((stacks.ask() or "no worker is connected") + "\n")
        sys.stderr.flush()

    def on_signal(number: int, frame: object) -> None:
        threading.Thread(target=write, name="sparkdl-stacks", daemon=True).start()

    signal.signal(signal.SIGUSR1, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _watch(
    averager: Averager,
    stacks: Stacks,
    context: SparkContext,
    jobs: RunJobs,
    tasks: int,
    ended: threading.Event,
) -> None:
    before: list[SparkStageInfo] = []
    seen = 0
    while not ended.wait(INTERVAL_S):
        if not averager.anyone_joined:
            try:
                now = jobs.stages()
                if now != before or computes_upstream(context, now, tasks):
                    averager.postpone_deadline()
            except (Py4JError, OSError) as error:
                logger.debug("Spark no longer answers: %s", error)
                return
            before = now
        dropped = averager.dropped
        if told := stacks.ask(dropped[seen:]) if len(dropped) > seen else "":
            logger.warning("a dropped worker is still running:\n%s", told)
        seen = len(dropped)


def computes_upstream(context: SparkContext, stages: Sequence[SparkStageInfo], tasks: int) -> bool:
    """Whether tasks are running whose results the workers need; a single one may take hours.

    Args:
        context: the Spark context.
        stages: the stages of the run's jobs.
        tasks: the number of tasks in which the workers run. Their own stage is one that feeds no
            shuffle and has as many: a worker that runs there and has not joined may hang.
    """
    return any(
        stage.numActiveTasks
        and (stage.numTasks != tasks or feeds_a_shuffle(context, stage.stageId))
        for stage in stages
    )
