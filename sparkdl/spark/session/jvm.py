"""Whether the driver's JVM is still there, and how it has ended."""

from __future__ import annotations

import contextlib
import signal
import subprocess

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext

END_S = 5.0
"""Seconds within which a JVM that no longer answers is gone from the system."""


def end_of_jvm(error: BaseException) -> str | None:
    """Say that Spark's JVM has ended, if that is why a call into it failed.

    Args:
        error: what the call raised.

    Returns:
        What happened, and what to do; None if the JVM still answers.
    """
    if isinstance(error, Py4JJavaError) or not isinstance(error, (Py4JError, OSError)):
        return None
    if _answers():
        return None
    process = getattr(SparkContext._gateway, "proc", None)  # spark-submit's JVM is our parent
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
