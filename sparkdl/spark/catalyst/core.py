"""Names of PySpark that need a JVM in this process, and what stands for them where there is none.

A client of Spark Connect (``pyspark-client``) has neither py4j nor ``pyspark.core``. It never meets
an instance of these classes, but code that serves both kinds of sessions asks for them. Each has a
name of its own, by which a task that a client sends finds Spark's class on an executor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
    from pyspark import RDD, Broadcast, SparkContext, SparkFiles, SparkStageInfo

    CAN_START_SPARK = True
else:
    try:
        from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
        from pyspark import RDD, Broadcast, SparkContext, SparkFiles, SparkStageInfo

        CAN_START_SPARK = True
    except ImportError:
        CAN_START_SPARK = False

        class Py4JError(Exception):
            """Never raised."""

        class Py4JJavaError(Py4JError):
            """Never raised."""

        class Py4JNetworkError(Py4JError):
            """Never raised."""

        class RDD:
            """Has no instances."""

        class Broadcast:
            """Has no instances."""

            def __class_getitem__(cls, kind: Any) -> Any:
                return cls

        class SparkStageInfo:
            """Has no instances."""

        class SparkFiles:
            """Has no instances."""

        class SparkContext:
            """Has no instances."""

            _active_spark_context: Any = None
            _gateway: Any = None
            _jvm: Any = None


__all__ = [
    "CAN_START_SPARK",
    "RDD",
    "Broadcast",
    "Py4JError",
    "Py4JJavaError",
    "Py4JNetworkError",
    "SparkContext",
    "SparkFiles",
    "SparkStageInfo",
]
