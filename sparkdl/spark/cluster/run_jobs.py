"""The Spark jobs of one run: started in a thread of their own, found again, and cancelled."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from pyspark import InheritableThread, SparkContext, SparkJobInfo

_GROUP = "spark.jobGroup.id"


class RunJobs:
    """Jobs that carry a tag of their own, in the job group of the caller if that has one.

    So whoever cancels the caller's group (a notebook that interrupts a cell does) cancels the run
    too, and cancelling the run cancels nothing else.

    Args:
        context: Spark's.
        description: of the jobs, for the Spark UI.

    Attributes:
        tag: theirs alone.
        group: their job group.
    """

    def __init__(self, context: SparkContext, description: str) -> None:
        self.tag = f"sparkdl-{uuid.uuid4().hex[:12]}"
        self._context = context
        self._description = description
        self.group = context.getLocalProperty(_GROUP) or self.tag

    def start(self, body: Callable[[], None]) -> InheritableThread:
        """Run a function whose Spark jobs are the run's, in a thread of its own."""

        def run() -> None:
            self._context.setJobGroup(self.group, self._description, interruptOnCancel=True)
            self._context.addJobTag(self.tag)
            body()

        thread = InheritableThread(target=run, name=f"{self.tag}-job", daemon=True)
        thread.start()
        return thread

    def cancel(self) -> None:
        """Have Spark end them."""
        self._context.cancelJobsWithTag(self.tag)

    def infos(self) -> list[SparkJobInfo]:
        """Those that Spark knows of."""
        tracker = self._context.statusTracker()
        known = self._context._jsc.sc().statusTracker().getJobIdsForTag(self.tag)
        found = [tracker.getJobInfo(job) for job in known]
        return [job for job in found if job is not None]
