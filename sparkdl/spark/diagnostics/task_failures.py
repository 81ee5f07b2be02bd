"""Why Spark says that a worker is gone, and which setting helps if it ran out of memory."""

from __future__ import annotations

import re
import time

from sparkdl.errors import WorkerLostError
from sparkdl.spark.cluster.run_jobs import RunJobs

REPORTED_S = 2.0
"""Seconds after the end of a job in which Spark's status store hears of its tasks."""
_PYTHON_DIED = "Python worker exited unexpectedly"
_EXECUTOR_DIED = "ExecutorLostFailure"
_HEAP_FULL = "): java.lang.OutOfMemoryError"
"""The end of a task whose executor exits, if the task's message arrives first."""
_RANK_DIED = f"{WorkerLostError.__module__}.{WorkerLostError.__qualname__}: "
"""How the error of a task with several ranks starts when one of their processes died."""
_LOSSES = _PYTHON_DIED, _EXECUTOR_DIED, _HEAP_FULL, _RANK_DIED
_HEAP = re.compile(r"java\.lang\.OutOfMemoryError|(?:code|status):? 52\b", re.IGNORECASE)
_KILLED = re.compile(
    r"(?:code|status):? 137\b|OOM|exceeding (?:physical |virtual )?memory limits", re.IGNORECASE
)
_AS_FOR_MEMORY = (
    "as the system does when a process takes too much memory (its log, dmesg, then says so): "
    "raise spark.executor.memoryOverhead, or lower batchSize"
)


def is_loss(text: str) -> bool:
    """Whether Spark's message for a failed job means that a process died, not that code raised."""
    return any(sign in text for sign in _LOSSES)


def memory_advice(text: str) -> str:
    """What to do if a process died, perhaps for lack of memory.

    Args:
        text: Spark's message about its end.

    Returns:
        One sentence; empty if it certainly ended for another reason.
    """
    if _HEAP.search(text):
        return (
            "The executor's JVM ran out of memory: raise spark.executor.memory, or, if rows are "
            "large, lower spark.sql.execution.arrow.maxRecordsPerBatch"
        )
    if _KILLED.search(text):
        return (
            "The executor was killed, as the system and cluster managers do when one takes too "
            "much memory: raise spark.executor.memoryOverhead, which Python and torch live in, "
            "or lower batchSize"
        )
    if "was ended by SIGKILL" in text:
        return f"The Python process was killed, {_AS_FOR_MEMORY}"
    if _PYTHON_DIED in text:
        return (
            "The Python process ended without an error: its code called os._exit, native code "
            f"crashed (the executor's stderr then says so), or it was killed, {_AS_FOR_MEMORY}"
        )
    return ""


def end_of_a_rank(text: str) -> str:
    """How a rank's process ended according to its task, with advice.

    Args:
        text: Spark's message for a failed job.

    Returns:
        A sentence or two; empty if no task said so.
    """
    told = [line.strip() for line in text.splitlines()]
    ends = [line.removeprefix(_RANK_DIED) for line in told if line.startswith(_RANK_DIED)]
    if not ends:
        return ""
    advice = memory_advice(ends[-1])
    return f"{ends[-1]}. {advice}" if advice else ends[-1]


def with_sparks_reason(
    error: WorkerLostError, jobs: RunJobs, ranks_a_task: int = 1
) -> WorkerLostError | None:
    """Add to an error what Spark knows about the tasks of a run that failed.

    Args:
        error: says that a worker is lost.
        jobs: the run's.
        ranks_a_task: ranks per task.

    Returns:
        An error that says more; None if Spark knows nothing.
    """
    failed = jobs.failed_tasks()
    if not failed:
        return None
    told = "; ".join(
        f"{_ranks(task.index, ranks_a_task)} on {task.host}: {_reason(task.message)}"
        for task in failed[-3:]
    )
    advice = memory_advice(_reason(failed[-1].message))
    said = f"{error}. Spark says of {told}" + (f". {advice}" if advice else "")
    return WorkerLostError(said, ranks=error.ranks)


def host_of_last_failure(jobs: RunJobs) -> str | None:
    """Where the last failed task of a run's jobs ran; None if Spark does not say so within 2 s."""
    due = time.monotonic() + REPORTED_S
    while not (failed := jobs.failed_tasks()):
        if time.monotonic() > due:
            return None
        time.sleep(0.05)
    return failed[-1].host


def _ranks(task: int, ranks_a_task: int) -> str:
    first = task * ranks_a_task
    return f"rank {first}" if ranks_a_task == 1 else f"ranks {first} to {first + ranks_a_task - 1}"


def _reason(message: str) -> str:
    """The most informative line of an error."""
    lines = message.splitlines()
    ours = [line for line in lines if line.startswith(_RANK_DIED)]
    return ours[-1].removeprefix(_RANK_DIED) if ours else lines[0]
