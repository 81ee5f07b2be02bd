"""Accumulators of PySpark's: what ranks add to them, and what the driver only tries out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import pyarrow as pa
from pyspark import Accumulator
from pyspark.accumulators import _accumulatorRegistry, _deserialize_accumulator

from sparkdl.user_code.stand_ins import Uncounted, stands_in

stands_in(Accumulator, lambda each: Uncounted(each.accum_param))

_ADDED = pa.schema([("added to accumulators", pa.binary())])


def added_here() -> Iterator[pa.RecordBatch]:
    """What has been added in the process of a rank, as a record batch for ``counted``.

    Yields:
        One record batch; none if there is no accumulator.
    """
    added = [(each.aid, each.accum_param, each._value) for each in _accumulatorRegistry.values()]
    if added:
        yield pa.record_batch([pa.array([cloudpickle.dumps(added)], pa.binary())], _ADDED)


def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add what ranks have added to their task's accumulators, which PySpark sends to the driver.

    Args:
        batches: what the ranks have yielded.

    Yields:
        Those that are not from ``added_here``.
    """
    for batch in batches:
        if not batch.schema.equals(_ADDED):
            yield batch
            continue
        for number, parameter, value in cloudpickle.loads(batch.column(0)[0].as_py()):
            zero = parameter.zero(value)
            _deserialize_accumulator(number, zero, parameter).add(value)


def accumulators_here() -> dict[int, Accumulator[Any]]:
    """The accumulators of this task, by number."""
    return dict(_accumulatorRegistry)


def count_again(accumulators: dict[int, Accumulator[Any]]) -> None:
    """Make accumulators of an earlier task count in this one, from zero.

    Args:
        accumulators: those that objects refer to which this process keeps.
    """
    for number, each in accumulators.items():
        if _accumulatorRegistry.setdefault(number, each) is each:
            each._value = each.accum_param.zero(each._value)


def discard_added() -> None:
    """Leave out what has been added in this task, because the task has not done what it should."""
    _accumulatorRegistry.clear()


_trial = threading.local()
_add = Accumulator.add


@contextmanager
def uncounted() -> Iterator[None]:
    """Ignore what this thread adds to accumulators: it only tries out the user's functions."""
    before, _trial.active = getattr(_trial, "active", False), True
    try:
        yield
    finally:
        _trial.active = before


def _add_unless_trial(self: Accumulator[Any], term: Any) -> None:
    if not getattr(_trial, "active", False):
        _add(self, term)


# The functions hold the objects themselves, and other threads go on counting in them meanwhile.
Accumulator.add = _add_unless_trial  # type: ignore[method-assign]
