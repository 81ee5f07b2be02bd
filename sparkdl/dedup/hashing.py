"""The hashes of a DataFrame's rows, computed by its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.dedup.image_hashes import IMAGE_HASHES, as_words, grey_images, hashed
from sparkdl.dedup.texts import not_utf8, simhash
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
        Columns ``first``, ``group``, ``word`` (a long; null if there is nothing to compare),
        ``fault`` (what is wrong with a row that cannot be hashed, else null) and ``blank`` (whether
        it is an image of a single grey value).
    """
    rows = frame.select(
        quoted(first).alias("first"),
        (F.lit(0) if group is None else quoted(group)).alias("group"),
        quoted(value).alias("value"),
    )
    if kind == "given":
        word, no_fault = F.col("value").cast("long"), F.lit(None).cast("string")
        return rows.select(
            "first",
            "group",
            word.alias("word"),
            no_fault.alias("fault"),
            F.lit(False).alias("blank"),
        )
    schema = T.StructType(rows.schema.fields[:2])
    schema = schema.add("word", "long").add("fault", "string").add("blank", "boolean")
    return rows.mapInArrow(partial(hash_batches, kind), schema)


def hash_batches(kind: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Hash the column ``value`` of each batch; the other two stay."""
    for batch in batches:
        columns = [batch.column("first"), batch.column("group")]
        columns += hash_rows(kind, batch.column("value"))
        yield pa.RecordBatch.from_arrays(columns, ["first", "group", "word", "fault", "blank"])


def hash_rows(kind: str, rows: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """The columns ``word``, ``fault`` and ``blank`` of rows, as ``hashes`` returns them."""
    faults: list[str | None] = [None] * len(rows)
    blank = np.zeros(len(rows), dtype=bool)
    words, known = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=bool)
    if kind == "simhash":
        known[:] = rows.is_valid().to_numpy(zero_copy_only=False)
        for index, fault in not_utf8(rows).items():
            faults[index], known[index] = fault, False
        words[known], full = simhash(rows.filter(pa.array(known)))
        for index in np.flatnonzero(known)[~full].tolist():
            faults[index], known[index] = NO_TEXT, False
    else:
        bits = []
        for index, image in enumerate(grey_images(rows)):
            if image is None or isinstance(image, str):
                faults[index] = image
            else:
                bits.append(hashed(image, kind))
                known[index], (least, most) = True, image.getextrema()
                blank[index] = least == most
        if bits:
            words[known] = as_words(np.stack(bits))
    return pa.array(words, mask=~known), pa.array(faults, pa.string()), pa.array(blank)


@contextmanager
def persisted(*frames: DataFrame) -> Iterator[None]:
    """Persist frames while the block runs, however it ends."""
    try:
        for frame in frames:
            frame.persist()
        yield
    finally:
        for frame in frames:
            frame.unpersist()
