"""What PySpark keeps in a task's process, for the processes of the task's ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyspark import BarrierTaskContext, TaskContext

from sparkdl.spark.catalyst.core import SparkFiles

_OF_BARRIERS = ("_conn_info", "_port", "_secret")
"""PySpark's attributes, in its various versions, by which a task reaches the executor's barrier."""


@dataclass(frozen=True)
class Surroundings:
    """What PySpark keeps in a task's process, to be passed on to a rank's process.

    Attributes:
        files: where Spark keeps the files that the user has added to the session.
        context: the task's context.
        barrier: how the task reaches its barrier, if it has one.
    """

    files: str
    context: TaskContext
    barrier: dict[str, Any] = field(repr=False)  # contains a secret

    @classmethod
    def of(cls, context: TaskContext) -> Surroundings:
        """The surroundings of the calling task."""
        barrier = {
            name: value for name, value in vars(BarrierTaskContext).items() if name in _OF_BARRIERS
        }
        return cls(SparkFiles.getRootDirectory(), context, barrier)

    def restore(self) -> None:
        """Put them where PySpark looks for them in this process."""
        SparkFiles._root_directory, SparkFiles._is_running_on_worker = self.files, True
        for kind in (TaskContext, BarrierTaskContext):
            kind._setTaskContext(self.context)
        for name, value in self.barrier.items():
            setattr(BarrierTaskContext, name, value)
