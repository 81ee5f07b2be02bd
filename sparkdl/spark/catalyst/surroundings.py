"""What PySpark keeps in a task's process, for the processes of the task's ranks."""

from __future__ import annotations

from pyspark import TaskContext

from sparkdl.spark.catalyst.core import SparkFiles


def restore(files: str, context: TaskContext) -> None:
    """Put things where PySpark looks for them in this process.

    Args:
        files: where Spark keeps the files that the user has added to the session.
        context: the task's context.
    """
    SparkFiles._root_directory, SparkFiles._is_running_on_worker = files, True
    TaskContext._setTaskContext(context)
