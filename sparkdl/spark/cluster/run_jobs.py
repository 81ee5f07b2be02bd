"""The Spark jobs of one run: started in a thread of their own, looked up, and cancelled."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from pyspark import InheritableThread, SparkContext, SparkJobInfo

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
        self.group = context.getLocalProperty(_GROUP) or self.tag

    def start(self, body: Callable[[], None]) -> InheritableThread:
        """Run a function in a thread of its own; its Spark jobs belong to the run."""

        def run() -> None:
            self._context.setJobGroup(self.group, self._description, interruptOnCancel=True)
            self._context.addJobTag(self.tag)
            body()

        thread = InheritableThread(target=run, name=f"{self.tag}-job", daemon=True)
        thread.start()
        return thread

    def cancel(self) -> None:
        """Have Spark cancel the run's jobs."""
        self._context.cancelJobsWithTag(self.tag)

    def infos(self) -> list[SparkJobInfo]:
        """The run's jobs that Spark knows of."""
        tracker = self._context.statusTracker()
        known = self._context._jsc.sc().statusTracker().getJobIdsForTag(self.tag)
        found = [tracker.getJobInfo(job) for job in known]
        return [job for job in found if job is not None]
