"""The driver's JVM: whether it is there, whose session it has, how it has ended, what it lacks.

Some names of PySpark need a JVM in this process, and others stand for them where there is none. A
client of Spark Connect (``pyspark-client``) has neither py4j nor ``pyspark.core``. It never meets
an instance of these classes, but code that serves both kinds of sessions asks for them. Each has a
name of its own, by which a task that a client sends finds Spark's class on an executor.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import signal
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from pyspark.ml.wrapper import JavaParams


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


logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

END_S = 5.0
"""Seconds within which a JVM that no longer answers is gone from the system."""


def end_of_jvm(error: BaseException) -> str | None:
    """Say that Spark's JVM has ended, if that is why a call into it failed.

    Returns:
        What happened, and what to do; None if the JVM still answers.
    """
    if isinstance(error, Py4JJavaError) or not isinstance(error, (Py4JError, OSError)):
        return None
    if not has_jvm() or _answers():
        return None
    # None if it is our parent, as spark-submit's.
    process = getattr(SparkContext._gateway, "proc", None)
    which, how = "Spark's JVM", "no longer answers"
    if process is not None:
        which = f"Spark's JVM (process {process.pid})"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(END_S)
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "has ended"
            how += f" with code {code}" if code > 0 else ""
    return (
        f"{which} {how}, and with it the session and all of its jobs. Its own output says why it "
        "crashed; a system short of memory kills it (its log, dmesg, then says so). Start this "
        "program again: a fit with checkpointPath goes on from its last checkpoint"
    )


def _answers() -> bool:
    try:
        SparkContext._jvm.java.lang.System.nanoTime()  # type: ignore[union-attr]
    except (Py4JError, OSError):
        return False
    return True


def has_jvm() -> bool:
    """Whether this process has ever had a session of its own JVM."""
    return SparkContext._gateway is not None


def is_of_connect(value: object) -> bool:
    """Whether something is a DataFrame or a session of Spark Connect, whose JVM is elsewhere."""
    # Its sessions are no SparkSessions, and its package imports what may not be installed.
    return any(each.__module__.startswith("pyspark.sql.connect.") for each in type(value).__mro__)


def size_setting(spark: SparkSession, name: str, default: str) -> int:
    """A setting of a session's application that is a size, in bytes.

    Args:
        spark: the session.
        name: the setting's name.
        default: what Spark takes if it is not set.
    """
    text = (setting(spark, name) or default).strip().lower()
    found = re.fullmatch(r"(\d+) ?([kmgtp]?)b?", text)
    if found is None:  # Spark refuses it where it uses it
        return 0
    return int(found[1]) << 10 * " kmgtp".index(found[2] or " ")


def is_true(spark: SparkSession, name: str) -> bool:
    """Whether a setting is switched on."""
    return (setting(spark, name) or "false").strip().lower() == "true"


def running_context() -> SparkContext | None:
    """The context of the session that runs in this process; None if there is none."""
    return SparkContext._active_spark_context


def has_accepted(stage: JavaParams) -> None:
    """Have the Java class of one of pyspark.ml's stages check the values of its Params now."""
    stage._transfer_params_to_java()


def is_stopped(spark: SparkSession) -> bool:
    """Whether a session's context was stopped, also from the JVM's side."""
    if is_of_connect(spark):
        return bool(spark.is_stopped)  # type: ignore[attr-defined] # of Spark Connect's
    context = spark.sparkContext._jsc
    return context is None or bool(context.sc().isStopped())


def with_fallback(plain: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function do the same in plain PySpark where a private name that it uses is missing.

    A warning says so once. So it does for Spark Connect, whose JVM is elsewhere, without one.

    Args:
        plain: takes the same arguments, and gives the same answer, if more slowly.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        warn_once = functools.cache(logger.warning)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if args and is_of_connect(args[0]):
                found: R = plain(*args, **kwargs)
                return found
            try:
                return function(*args, **kwargs)
            except (AttributeError, TypeError, Py4JError) as error:
                context = SparkContext._active_spark_context
                stopped = context is None or context._jsc is None
                if stopped or not _is_missing_name(error):
                    raise
                warn_once(
                    "%s does without a private name that this Spark lacks or denies: %s",
                    function.__name__,
                    str(error).splitlines()[0],
                )
            answer: R = plain(*args, **kwargs)
            return answer

        return call

    return decorate


def _setting_of_copy(spark: SparkSession, name: str) -> str | None:
    if is_of_connect(spark):
        return spark.conf.get(name, None)  # Spark copies the application's into each session's
    return spark.sparkContext.getConf().get(name)


@with_fallback(_setting_of_copy)
def setting(spark: SparkSession, name: str) -> str | None:
    """A setting of a session's application, or one of ours in the session; None if it has none."""
    own = spark.conf.get(name, None) if name.startswith("spark.sparkdl.") else None
    # ``getConf`` copies all settings to the JVM and back, which takes 10 ms.
    return own or spark.sparkContext._conf.get(name)


def _is_missing_name(error: Exception) -> bool:
    """Whether an error is how PySpark or py4j say that they, or the JVM, have no such name.

    Some platforms deny names of the JVM that are not on a list of theirs.
    """
    if isinstance(error, AttributeError):
        return type(error.obj).__module__.partition(".")[0] in ("pyspark", "py4j")
    if isinstance(error, TypeError):
        return "'JavaPackage' object is not callable" in str(error)
    if isinstance(error, (Py4JJavaError, Py4JNetworkError)):
        return False
    return "does not exist" in str(error) or "Py4JSecurityException" in str(error)
