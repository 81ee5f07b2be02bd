"""Minibatches of a Parquet table from petastorm's Spark converter; runs in its own environment.

``petastorm_job.py FOLDER BATCH_SIZE REPEATS`` prints the seconds of first epochs (the converter
writes its copy, then one pass) and of later ones (a shuffled pass over the copy), each a list.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from petastorm.spark import (  # type: ignore[import-not-found]
    SparkDatasetConverter,
    make_spark_converter,
)
from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def main(folder: Path, batch_size: int, repeats: int) -> None:
    """Measures and prints."""
    spark = (
        SparkSession.builder.master("local-cluster[2,1,2048]")
        .config("spark.executor.memory", "2048m")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.files.maxPartitionBytes", "4g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    first, later = [], []
    with tempfile.TemporaryDirectory() as cache:
        spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{cache}")
        frame = spark.read.parquet(str(folder))
        for turn in range(repeats + 1):  # the first turn warms the session up and is thrown away
            started = time.perf_counter()
            # The extra column keeps the converter from finding its copy of the turn before.
            converter = make_spark_converter(frame.withColumn("turn", F.lit(turn)))
            passes(converter, batch_size, shuffle=False)
            first.append(time.perf_counter() - started)
            started = time.perf_counter()
            passes(converter, batch_size, shuffle=True)
            later.append(time.perf_counter() - started)
            converter.delete()
    spark.stop()
    print(json.dumps({"first": first[1:], "later": later[1:]}), flush=True)


def passes(converter: Any, batch_size: int, *, shuffle: bool) -> None:
    """Takes every minibatch once."""
    capacity = 8192 if shuffle else 0
    with converter.make_torch_dataloader(
        batch_size=batch_size,
        num_epochs=1,
        workers_count=2,
        shuffling_queue_capacity=capacity,
    ) as batches:
        for _ in batches:
            pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
