"""How much of its rows Spark hands to a worker at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkContext

SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
RECORD_BATCH_BYTES = 2 << 20
"""A record batch of this size is still in the processor's cache when it is checked and stored.
Spark's default is 10,000 rows, 31 MB at 784 floats each: reading those took a quarter longer."""


@contextmanager
def small_record_batches(context: SparkContext) -> Iterator[None]:
    """Have the Spark jobs of this thread send about ``RECORD_BATCH_BYTES`` at a time.

    Executors learn of it from a job property, which the session's setting of the same name
    overrides: nobody else's jobs change, and users who have set it get what they set.

    Args:
        context: Spark's.
    """
    before = context.getLocalProperty(SETTING)
    context.setLocalProperty(SETTING, str(RECORD_BATCH_BYTES))
    try:
        yield
    finally:
        context.setLocalProperty(SETTING, before)  # type: ignore[arg-type] # None removes it
