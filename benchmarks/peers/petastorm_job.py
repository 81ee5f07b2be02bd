"""Minibatches of a Parquet table from petastorm's Spark converter; runs in its own environment.

``petastorm_job.py FOLDER ROWS BATCH_SIZE REPEATS`` prints the seconds of first epochs (it writes
its copy, then one pass of ``BatchedDataLoader``) and of later ones (a shuffled pass of
``InMemBatchedDataLoader``, once it has all rows in memory), each a list.
"""

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
from petastorm.pytorch import (  # type: ignore[import-not-found]
    BatchedDataLoader,
    InMemBatchedDataLoader,
)
from petastorm.spark import (  # type: ignore[import-not-found]
    SparkDatasetConverter,
    make_spark_converter,
)
from pyspark.sql import functions as F


def main(folder: Path, rows: int, batch_size: int, repeats: int) -> None:
    """Measures and prints."""
    spark = harness.session(conf={"spark.sql.files.maxPartitionBytes": "4g"})
    spark.sparkContext.setLogLevel("OFF")
    first, later = [], []
    with tempfile.TemporaryDirectory() as cache:
        spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{cache}")
        frame = spark.read.parquet(str(folder))
        for turn in range(repeats + 1):  # the first turn warms the session up and is thrown away
            started = time.perf_counter()
            # The extra column keeps the converter from finding its copy of the turn before.
            converter = make_spark_converter(frame.withColumn("turn", F.lit(turn)))
            batches_of = partial(
                converter.make_torch_dataloader, batch_size, num_epochs=1, workers_count=2
            )
            with batches_of(data_loader_fn=BatchedDataLoader) as batches:
                first.append(seconds_of(batches, rows, started))
            later.append(seconds_in_memory(batches_of, rows))
            converter.delete()
    spark.stop()
    print(json.dumps({"first": first[1:], "later": later[1:]}), flush=True)


def seconds_in_memory(batches_of: Any, rows: int) -> float:
    """Takes every minibatch of rows in memory once; returns the seconds."""
    for _ in range(5):
        try:
            with batches_of(data_loader_fn=partial(in_memory, rows)) as batches:
                return seconds_of(batches, rows, time.perf_counter())
        except TypeError:  # petastorm's reader ends before its first row now and then
            continue
    raise RuntimeError("petastorm has read no rows, five times")


def in_memory(
    rows: int, *, reader: Any, batch_size: int, shuffling_queue_capacity: int
) -> InMemBatchedDataLoader:
    """Returns a loader that has read all rows."""
    return InMemBatchedDataLoader(reader, batch_size, rows_capacity=rows, shuffle=True)


def seconds_of(batches: Any, rows: int, started: float) -> float:
    """Takes every minibatch once; returns the seconds since ``started``."""
    taken = sum(len(batch["label"]) for batch in batches)
    if taken != rows:
        raise RuntimeError(f"{taken} rows came, not {rows}")
    return time.perf_counter() - started


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
