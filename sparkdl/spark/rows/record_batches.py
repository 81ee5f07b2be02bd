"""How much of its rows Spark hands to a worker at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkContext

SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
RECORD_BATCH_BYTES = 2 << 20
"""A record batch of this size is still in the processor's cache when it is looked at and stored.
Spark's own are 10,000 rows, 31 MB of 784 floats: reading those took a quarter longer."""


@contextmanager
def small_record_batches(context: SparkContext) -> Iterator[None]:
    """Have the Spark jobs of this thread send ``RECORD_BATCH_BYTES`` at a time, give or take.

    Executors learn of it by a property of the job, which the session's setting of the same name
    overrides: nobody else's jobs change, and who has set it gets what they have set.

    Args:
        context: Spark's.
    """
    before = context.getLocalProperty(SETTING)
    context.setLocalProperty(SETTING, str(RECORD_BATCH_BYTES))
    try:
        yield
    finally:
        context.setLocalProperty(SETTING, before)  # type: ignore[arg-type] # None takes it away
