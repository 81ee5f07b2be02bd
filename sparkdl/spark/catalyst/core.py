"""Names of PySpark that need a JVM in this process, and what stands for them where there is none.

A client of Spark Connect (``pyspark-client``) has neither py4j nor ``pyspark.core``. It never meets
an instance of these classes, but code that serves both kinds of sessions asks for them.
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

        class SparkContext:
            """Has no instances, as what goes by its name has none."""

            _active_spark_context = _gateway = _jvm = None

            def __class_getitem__(cls, kind: Any) -> Any:
                return cls

        Py4JJavaError = Py4JNetworkError = Py4JError
        RDD = Broadcast = SparkStageInfo = SparkFiles = SparkContext


__all__ = ["CAN_START_SPARK", "RDD", "Broadcast", "Py4JError", "Py4JJavaError", "Py4JNetworkError"]
__all__ += ["SparkContext", "SparkFiles", "SparkStageInfo"]
