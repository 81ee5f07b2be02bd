"""Pickles of the user's functions for executors, and the broadcast variables that they refer to.

PySpark notes a broadcast variable, for the thread, while it pickles the function that uses it, and
sends it along with the next function that it runs. Ours is pickled earlier, and often in another
thread. So the pickler here notes it in ``References`` instead, and the ``References`` are part of
the function that PySpark pickles.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from typing import Any

from pyspark import Accumulator, Broadcast, SparkContext
from pyspark.core.broadcast import _broadcastRegistry, _from_id

from sparkdl.user_code.references import ReferencePickler
from sparkdl.user_code.stand_ins import Uncounted, ValueOf, stands_in


@dataclass
class References:
    """What pickles refer to.

    Attributes:
        names: of modules, or of what a module may have; see ``user_code.references``.
        broadcasts: broadcast variables by number. Pickled by PySpark, they have their values in the
            task that unpickles them.
    """

    names: set[str] = field(default_factory=set)
    broadcasts: dict[int, Broadcast[Any]] = field(default_factory=dict)


class ClosurePickler(ReferencePickler):
    """Pickles for executors, and notes what the pickle refers to.

    Args:
        file: where it writes to.
        references: where it adds what it finds.
    """

    def __init__(self, file: io.BytesIO, references: References) -> None:
        super().__init__(file, references.names)
        self._references = references

    def reducer_override(self, value: Any) -> Any:
        """Called by the pickler for everything but numbers, texts and plain containers."""
        if not isinstance(value, Broadcast):
            return super().reducer_override(value)
        # Not PySpark's own way, which would send it along with the user's next function too.
        number = _number(value)
        self._references.broadcasts[number] = value
        return _from_id, (number,)


def pickled(value: Any, references: References) -> bytes:
    """Pickle an object for executors.

    Args:
        value: the object.
        references: where what it refers to is added.
    """
    file = io.BytesIO()
    ClosurePickler(file, references).dump(value)
    return file.getvalue()


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


def _number(value: Broadcast[Any]) -> int:
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


stands_in(Broadcast, lambda each: ValueOf(each.value))
stands_in(Accumulator, lambda each: Uncounted(each.accum_param))
# PySpark's class can only be pickled in the driver, so a model that holds one could not be copied.
Broadcast.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
