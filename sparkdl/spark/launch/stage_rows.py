"""The rows of one run's stage as its tasks end, and the stage's end: in a driver or in a client."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

from pyspark.sql import Row, SparkSession
from typing_extensions import Self

from sparkdl.errors import SparkDLError, WorkerLostError
from sparkdl.spark.catalyst.jvm import is_of_connect
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.diagnostics.task_failures import end_of_a_rank, host_of_last_failure
from sparkdl.spark.launch.launcher import as_training_error


class StageRows(Protocol):
    """Reads the rows of a stage; a context manager that ends what is left of it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def read(self, start: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        """The rows of the stage that ``start`` starts; raises what ends it."""

    def cancel(self) -> None:
        """End the stage; does nothing to one that has ended."""

    def explained(self, error: Exception) -> SparkDLError:
        """Why the stage has failed."""


def stage_rows(spark: SparkSession, description: str) -> StageRows:
    """What reads a stage of a session.

    Args:
        spark: the session.
        description: of the stage, shown in the Spark UI if the session is one of this driver's.
    """
    return InClient(spark) if is_of_connect(spark) else InDriver(spark, description)


class InClient:
    """Of Spark Connect, where operations have tags; in the thread of the caller."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark, self._tag = spark, f"sparkdl-{uuid.uuid4().hex}"

    def __enter__(self) -> Self:
        self._spark.addTag(self._tag)
        return self

    def __exit__(self, *_: object) -> None:
        self._spark.removeTag(self._tag)
        self.cancel()

    def read(self, start: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        """See ``StageRows``."""
        return start()

    def cancel(self) -> None:
        """See ``StageRows``."""
        self._spark.interruptTag(self._tag)

    def explained(self, error: Exception) -> SparkDLError:
        """See ``StageRows``."""
        return as_training_error(error)


class InDriver:
    """In a thread of its own, so that an interrupt of the caller need not wait for Spark."""

    def __init__(self, spark: SparkSession, description: str) -> None:
        self._spark, self._jobs = spark, RunJobs(spark.sparkContext, description)
        self._arrived: SimpleQueue[Row | Exception | None] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._jobs.end()

    def read(self, start: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        """See ``StageRows``."""

        def body() -> None:
            for row in start():
                self._arrived.put(row)
            self._arrived.put(None)

        self._jobs.start(body, self._arrived.put)
        while (arrived := self._arrived.get()) is not None:
            if isinstance(arrived, Exception):
                raise arrived
            yield arrived

    def cancel(self) -> None:
        """See ``StageRows``."""
        self._jobs.cancel()

    def explained(self, error: Exception) -> SparkDLError:
        """See ``StageRows``."""
        if end := end_of_a_rank(str(error)):
            return WorkerLostError(end)
        return as_training_error(error, lambda: host_of_last_failure(self._spark, self._jobs.group))
