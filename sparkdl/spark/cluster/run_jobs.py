"""The Spark jobs of one run: started in a thread of their own, looked up, and ended."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

from pyspark import InheritableThread

from sparkdl.spark.catalyst.cluster import FailedTask, failed_tasks, jobs_with_tag
from sparkdl.spark.catalyst.jvm import Py4JError, SparkContext, SparkStageInfo

logger = logging.getLogger(__name__)

CANCEL_S = 0.2
"""Seconds between two requests to Spark to cancel a run's jobs."""
JOB_END_S = 30.0
"""Seconds to wait for a Spark job to end once every worker has finished or was cancelled."""

_GROUP = "spark.jobGroup.id"


class RunJobs:
    """Jobs that carry a tag of their own, in the caller's job group if there is one.

    So whoever cancels the caller's group (as a notebook does on interrupting a cell) cancels the
    run too, and cancelling the run cancels nothing else.

    Args:
        context: the Spark context.
        description: describes the jobs in the Spark UI.

    Attributes:
        tag: the tag that only these jobs have.
        group: their job group.
    """

    def __init__(self, context: SparkContext, description: str) -> None:
        self.tag = f"sparkdl-{uuid.uuid4().hex[:12]}"
        self._context = context
        self._description = description
        self._lock = threading.Lock()
        self._begun, self._ended = False, threading.Event()
        self._ended.set()
        self.group = context.getLocalProperty(_GROUP) or self.tag

    def start(self, body: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Run a function in a thread of its own, once; its Spark jobs belong to the run.

        Args:
            body: the function.
            failed: called in that thread with what the function raises.
        """
        self._ended.clear()  # first: an interrupt may come as soon as the thread is there

        def in_callers_group() -> None:
            with self._lock:
                if self.ended:
                    return
                self._begun = True
            self._context.setJobGroup(self.group, self._description, interruptOnCancel=True)
            self._context.addJobTag(self.tag)
            body()

        thread = InheritableThread(target=in_callers_group, name=f"{self.tag}-job", daemon=True)
        inherit_and_run = thread.run

        def run() -> None:
            try:
                inherit_and_run()
            except Exception as error:  # whatever ends a Spark job, or keeps it from beginning
                failed(error)
            finally:
                self._ended.set()

        thread.run = run  # type: ignore[method-assign] # around PySpark's part, which may fail too
        thread.start()

    @property
    def ended(self) -> bool:
        """Whether what was started has ended, if anything was."""
        return self._ended.is_set()

    def wait(self, patience_s: float) -> bool:
        """Wait up to ``patience_s`` until what was started has ended; returns whether it has."""
        return self._ended.wait(patience_s)

    def cancel(self) -> None:
        """Have Spark cancel the run's jobs, those too that it does not know yet.

        A job may be planned for seconds before Spark knows it. So Spark is asked again until all
        have ended, in a thread that no second interrupt of the caller reaches.
        """
        with self._lock:
            if not self._begun:
                self._ended.set()
        if not self.ended:
            threading.Thread(target=self._cancel, name=f"{self.tag}-cancel", daemon=True).start()

    def end(self, patience_s: float = 0.0) -> None:
        """Let the jobs end by themselves, then cancel what is left of them, and wait again.

        Args:
            patience_s: how long to let them, in seconds.
        """
        try:
            self.wait(patience_s)
        finally:
            if not self.ended:
                self.cancel()
                if not self.wait(JOB_END_S):
                    logger.warning(
                        "Spark jobs with tag %s did not end within %.0f s", self.tag, JOB_END_S
                    )

    def failed_tasks(self) -> list[FailedTask]:
        """The failed tasks of the last of the run's jobs, in the order of their IDs.

        None where Spark does not say, or no longer answers.
        """
        try:
            # By tag: the caller's group may have others that run at the same time.
            last = sorted(jobs_with_tag(self._context, self.tag, self.group))[-1:]
            jobs = [self._context.statusTracker().getJobInfo(job) for job in last]
            stages = [stage for job in jobs if job is not None for stage in job.stageIds]
            failed = [task for stage in stages for task in failed_tasks(self._context, stage)]
        except (Py4JError, OSError, AttributeError) as unanswered:
            # The session was stopped, or its JVM has ended.
            logger.debug("Spark no longer answers: %s", unanswered)
            return []
        return sorted(failed, key=lambda task: task.number)

    def stages(self) -> list[SparkStageInfo]:
        """The stages of the run's jobs that Spark knows of."""
        tracker = self._context.statusTracker()
        numbers = jobs_with_tag(self._context, self.tag, self.group)
        jobs = [tracker.getJobInfo(job) for job in numbers]
        numbers = sorted({stage for job in jobs if job is not None for stage in job.stageIds})
        stages = [tracker.getStageInfo(number) for number in numbers]
        return [stage for stage in stages if stage is not None]

    def _cancel(self) -> None:
        while not self.ended:
            try:
                self._context.cancelJobsWithTag(self.tag)
            except (Py4JError, OSError, AttributeError) as error:
                # The session was stopped or its JVM has ended, and the jobs with it.
                logger.debug("Spark no longer cancels jobs: %s", error)
                return
            self._ended.wait(CANCEL_S)
