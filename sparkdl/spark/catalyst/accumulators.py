"""What PySpark keeps in a task's process, for the processes of its ranks; what they add to."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pyarrow as pa
from pyspark import TaskContext
from pyspark.accumulators import _accumulatorRegistry, _deserialize_accumulator

from sparkdl.spark.catalyst.jvm import SparkFiles

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


def restore(files: str, context: TaskContext) -> None:
    """Put things where PySpark looks for them in this process.

    Args:
        files: where Spark keeps the files that the user has added to the session.
        context: the task's context.
    """
    SparkFiles._root_directory, SparkFiles._is_running_on_worker = files, True
    TaskContext._setTaskContext(context)
