"""PySpark's broadcast variables: how long they stay, and whose they are."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

from sparkdl.spark.catalyst.jvm import Broadcast, Py4JError, SparkContext

# PySpark's class can only be pickled in the driver, so a model that holds one could not be copied.
Broadcast.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]


_kept: list[tuple[SparkContext, Any, Path]] = []
"""Java's weak references to variables, and their files, which PySpark deletes only with them."""
_lock = threading.Lock()


def broadcast(context: SparkContext, content: bytes) -> Broadcast[bytes]:
    """Broadcast bytes until nothing in the JVM refers to them: no function, no plan of a DataFrame.

    Spark then cleans up after itself. The driver's file is deleted at the next call.
    """
    sent = context.broadcast(content)
    assert context._jvm is not None
    with _lock:
        for kept in _kept.copy():
            if kept[0] is not context or kept[1].get() is None:
                _kept.remove(kept)
                kept[2].unlink(missing_ok=True)
        weak = context._jvm.java.lang.ref.WeakReference(sent._jbroadcast)
        _kept.append((context, weak, Path(sent._path)))
    return sent


def destroy(sent: Broadcast[Any]) -> None:
    """Delete a broadcast variable everywhere, unless its session was stopped before."""
    with contextlib.suppress(Py4JError, OSError):
        sent.destroy()


def is_of_running_session(value: Broadcast[Any]) -> bool:
    """Whether a broadcast variable's session is the one that runs now."""
    return value._sc is SparkContext._active_spark_context
