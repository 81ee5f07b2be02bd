"""Watches a run from the driver: is Spark still getting to the workers, and which are stuck?"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sparkdl.averager.service.server import Averager
from sparkdl.errors import CollectiveError, DeadlineError
from sparkdl.spark.catalyst.cluster import feeds_a_shuffle
from sparkdl.spark.catalyst.jvm import Py4JError, SparkContext, SparkStageInfo
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.diagnostics.stacks import Stacks
from sparkdl.user_code.tracebacks import add_note

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Seconds between two checks."""
LEAVE_S = 1.0
"""Seconds within which workers that are not stuck leave."""


@contextmanager
def watched(
    service: Averager | RunService, stacks: Stacks, jobs: RunJobs, context: SparkContext, tasks: int
) -> Iterator[None]:
    """Watch the workers of a run while it lasts.

    The time until workers count as not started runs only while Spark does nothing for them: it
    stops while Spark plans or tasks run whose results they need, and starts over on progress. The
    stacks of a worker that is dropped for its silence are logged; an error that says who was waited
    for has those of workers that stay as a note. On SIGUSR1 to this process, every worker's are
    written to standard error.

    Args:
        service: what the workers join.
        stacks: asks the workers.
        jobs: the run's jobs.
        context: the Spark context.
        tasks: the number of tasks in which the workers run.
    """
    ended = threading.Event()

    def show() -> None:
        print(stacks.ask() or "no worker is connected", file=sys.stderr, flush=True)

    def watch() -> None:
        before, seen = list[SparkStageInfo](), 0
        while not ended.wait(INTERVAL_S):
            if not service.anyone_joined:
                try:
                    now = jobs.stages()
                    if not now or now != before or computes_upstream(context, now, tasks):
                        service.postpone_deadline()
                    before = now
                except (Py4JError, OSError) as error:
                    logger.debug("Spark no longer answers: %s", error)
                    return
            dropped = service.dropped
            if told := stacks.ask(dropped[seen:]) if len(dropped) > seen else "":
                logger.warning("a dropped worker is still running:\n%s", told)
            seen = len(dropped)

    thread = threading.Thread(target=watch, name="sparkdl-watchdog", daemon=True)
    thread.start()
    # The user's own handler stays; outside the main thread none can be set.
    in_main_thread = threading.current_thread() is threading.main_thread()
    handles = in_main_thread and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    if handles:
        signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=show, daemon=True).start())
    try:
        yield
    except (DeadlineError, CollectiveError) as error:
        # The others were told to leave: those still there are stuck.
        time.sleep(LEAVE_S)
        if told := stacks.ask():
            add_note(error, f"Workers that have not left:\n{told}")
        raise
    finally:
        if handles:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        ended.set()
        thread.join(10 * INTERVAL_S)


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
