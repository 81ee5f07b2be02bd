"""PySpark's broadcast variables: how long they stay, and whose they are."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any, NamedTuple

from sparkdl.spark.catalyst.core import (
    Broadcast,
    Py4JError,
    SparkContext,
)

# PySpark's class can only be pickled in the driver, so a model that holds one could not be copied.
Broadcast.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]


class _Kept(NamedTuple):
    """A file of the driver's that PySpark deletes only if its broadcast variable is destroyed."""

    context: SparkContext
    reference: Any
    """Java's weak reference to the variable."""
    path: Path


_kept: list[_Kept] = []
_lock = threading.Lock()


def broadcast(context: SparkContext, content: bytes) -> Broadcast[bytes]:
    """Broadcast bytes until nothing in the JVM refers to them: no function, no plan of a DataFrame.

    Spark then cleans up after itself. The driver's file is deleted at the next call.
    """
    sent = context.broadcast(content)
    assert context._jvm is not None
    weak = context._jvm.java.lang.ref.WeakReference(sent._jbroadcast)
    with _lock:
        unused = [each for each in _kept if not _is_used(each)]
        _kept[:] = [
            *(each for each in _kept if each not in unused),
            _Kept(context, weak, Path(sent._path)),
        ]
    for each in unused:
        each.path.unlink(missing_ok=True)
    return sent


def _is_used(kept: _Kept) -> bool:
    running = kept.context is SparkContext._active_spark_context
    return running and kept.reference.get() is not None


def destroy(sent: Broadcast[Any]) -> None:
    """Delete a broadcast variable everywhere, unless its session was stopped before."""
    with contextlib.suppress(Py4JError, OSError):
        sent.destroy()


def is_of_running_session(value: Broadcast[Any]) -> bool:
    """Whether a broadcast variable's session is the one that runs now."""
    return value._sc is SparkContext._active_spark_context
