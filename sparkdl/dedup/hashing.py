"""The hashes of a DataFrame's rows, computed by its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.dedup.image_hashes import IMAGE_HASHES, grey_images, hashed, reduced
from sparkdl.dedup.texts import simhash
from sparkdl.spark.rows.columns import quoted

HASHES = (*IMAGE_HASHES, "simhash", "given")
NO_TEXT = "it has neither letters nor digits"


def hashes(frame: DataFrame, kind: str, value: str, group: str | None, first: str) -> DataFrame:
    """A row for each, with what it is compared by.

    Args:
        frame: the rows.
        kind: one of ``HASHES``.
        value: the column that is hashed.
        group: the column whose equal values are compared; None for all.
        first: the column of the order.

    Returns:
        Columns ``first``, ``group``, ``word`` (a long; null if there is nothing to compare) and
        ``fault`` (what is wrong with a row that cannot be hashed, else null).
    """
    rows = frame.select(
        quoted(first).alias("first"),
        (F.lit(0) if group is None else quoted(group)).alias("group"),
        quoted(value).alias("value"),
    )
    if kind == "given":
        no_fault = F.lit(None).cast("string").alias("fault")
        return rows.select("first", "group", F.col("value").cast("long").alias("word"), no_fault)
    added = [T.StructField("word", T.LongType()), T.StructField("fault", T.StringType())]
    schema = T.StructType([*rows.schema.fields[:2], *added])
    return rows.mapInArrow(partial(hash_batches, kind), schema)


def hash_batches(kind: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Hash the column ``value`` of each batch; the other two stay."""
    for batch in batches:
        words, faults = hash_rows(kind, batch.column("value"))
        columns = [batch.column("first"), batch.column("group"), words, faults]
        yield pa.RecordBatch.from_arrays(columns, ["first", "group", "word", "fault"])


def hash_rows(kind: str, rows: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The hashes of rows, null where there is none, and what is wrong with those, else null."""
    faults: list[str | None] = [None] * len(rows)
    words, known = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=bool)
    if kind == "simhash":
        known[:] = rows.is_valid().to_numpy(zero_copy_only=False)
        words[known], full = simhash(rows.drop_null())
        for index in np.flatnonzero(known)[~full].tolist():
            faults[index], known[index] = NO_TEXT, False
    else:
        small = []
        for index, image in enumerate(grey_images(rows)):
            if image is None or isinstance(image, str):
                faults[index] = image
            else:
                small.append(reduced(image, kind))
                known[index] = True
        if small:
            words[known] = hashed(np.stack(small), kind)
    return pa.array(words, mask=~known), pa.array(faults, pa.string())
