"""PySpark's broadcast variables: how they are told apart, end, and reach a process."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from pathlib import Path
from typing import Any, NamedTuple

from sparkdl.spark.catalyst.core import (
    Broadcast,
    Py4JError,
    SparkContext,
    _broadcastRegistry,
)
from sparkdl.user_code.stand_ins import ValueOf, stands_in

stands_in(Broadcast, lambda each: ValueOf(each.value))
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


def number_of(value: Broadcast[Any]) -> int:
    """A broadcast variable's number in its application.

    Raises:
        PicklingError: it cannot be used any more.
    """
    java, context = value._jbroadcast, value._sc
    if java is None or context is None:
        raise pickle.PicklingError("only the driver can send a broadcast variable")
    if context is not SparkContext._active_spark_context:
        raise pickle.PicklingError("its Spark session was stopped")
    if not java.isValid():
        raise pickle.PicklingError("it was destroyed")
    return int(java.id())


def is_of_running_session(value: Broadcast[Any]) -> bool:
    """Whether a broadcast variable's session is the one that runs now."""
    return value._sc is SparkContext._active_spark_context


def stored_broadcasts(broadcasts: dict[int, Broadcast[Any]]) -> dict[int, str | bytes]:
    """The files with the values of a task's broadcast variables, by number.

    Where Spark encrypts its files, they are the pickled values themselves.
    """
    paths = {number: getattr(each, "_path", None) for number, each in broadcasts.items()}
    return {
        number: pickle.dumps(broadcasts[number].value) if path is None else path
        for number, path in paths.items()
    }


def put_broadcasts(stored: dict[int, str | bytes]) -> None:
    """Give this process the broadcast variables of its task, whose values are read on first use.

    Args:
        stored: what ``stored_broadcasts`` returned there.
    """
    for number, where in stored.items():
        held: Broadcast[Any]
        if isinstance(where, str):
            held = Broadcast(path=where)
        else:
            held = Broadcast(sock_file=io.BytesIO(where))  # type: ignore[call-overload]
        _broadcastRegistry[number] = held
