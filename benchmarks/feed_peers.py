"""Rows/s from a Spark DataFrame into minibatches, against petastorm and pyspark's own loader.

The tables are those of feed_epochs.py. petastorm's Spark converter (0.13.1, in an environment of
its own, 1.7 GB, made on first use) gets a part of the rows, enough to measure its rate; it writes a
copy as Parquet and reads it with two threads. Its first epoch is the writing and one pass of its
``BatchedDataLoader``; later epochs are shuffled passes of its ``InMemBatchedDataLoader``, which has
read all rows before the clock starts. pyspark's private partition loader is what
functions under TorchDistributor get: it reads an Arrow file that the task has spilled, by default
in a process of its own, and cannot shuffle. First epochs are whole Spark jobs of two tasks, later
ones are passes in a single process, both in turns with ours. The loader is measured with its
defaults, and without a process of its own, which is faster.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import feed_epochs
import harness
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.ml.torch.distributor import (
    SPARK_DATAFRAME_SCHEMA_FILE,
    SPARK_PARTITION_ARROW_DATA_FILE,
    _get_spark_partition_data_loader,
)
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema
from torch.utils.data import DataLoader

PETASTORM_ROWS = {"200,000 x 784": 200_000, "2,000,000 x 16": 400_000}
SPILLED_ROWS = 10_000
"""Rows of the record batches that Spark spills by default."""
SPILLED_TABLE_ROWS = {"200,000 x 784": 200_000, "2,000,000 x 16": 200_000}
"""The rows that the loader's later epochs get, enough to measure its rate."""
LOADERS = {"pyspark's loader": 1, "pyspark's loader in the same process": 0}
"""The number of processes that load."""
TARGETS = {"petastorm": (2.0, 10.0), **dict.fromkeys(LOADERS, (10.0, 10.0))}
Rates = dict[str, tuple[float, float]]


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=3)
    torch.set_num_threads(1)
    python = harness.peer_python("petastorm")
    rates: dict[str, Rates] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for table, (rows, width) in feed_epochs.TABLES.items():
            feed_epochs.write(folder / table, rows, width)
            feed_epochs.write(folder / f"petastorm {width}", PETASTORM_ROWS[table], width)
        jobs = {name: partial(loader_job, count) for name, count in LOADERS.items()}
        first = feed_epochs.first_epochs(folder, chosen.repeats, jobs)
        for table, (rows, width) in feed_epochs.TABLES.items():
            part = SPILLED_TABLE_ROWS[table]
            with spilled(folder / table, part) as make:
                others = {name: partial(make, count) for name, count in LOADERS.items()}
                later = feed_epochs.later_epochs(rows, width, folder, chosen.repeats, others)
            for name in LOADERS:
                later[name] *= part / rows
            rates[table] = {name: (first[table][name], later[name]) for name in ("ours", *LOADERS)}
            rates[table]["petastorm"] = petastorm(
                python, folder / f"petastorm {width}", PETASTORM_ROWS[table], chosen.repeats
            )
    report(rates)


def report(rates: dict[str, Rates]) -> None:
    """Prints the claims and the JSON line."""
    claims = [
        harness.Claim(
            name=f"{table}: {epochs} / {peer}",
            ratio=measured["ours"][index] / measured[peer][index],
            target=targets[index],
            at_least=True,
        )
        for table, measured in rates.items()
        for peer, targets in TARGETS.items()
        for index, epochs in enumerate(("first epoch", "later epochs"))
    ]
    harness.report("feed_peers", claims, {"first_and_later_rows_per_second": rates})


def petastorm(python: Path, folder: Path, rows: int, repeats: int) -> tuple[float, float]:
    """Rows/s of first and later epochs."""
    script = harness.FOLDER / "peers" / "petastorm_job.py"
    seconds = harness.run_child(
        [python, script, *map(str, (folder, rows, feed_epochs.BATCH_SIZE, repeats))],
        environment=harness.child_environment(python=python) | {"OMP_NUM_THREADS": "1"},
    )
    first, later = (
        rows / harness.show(f"petastorm, {folder.name}, {epochs}", seconds[epochs], digits=2)
        for epochs in ("first", "later")
    )
    return first, later


def loader_job(processes: int, frame: DataFrame) -> float:
    """Seconds of a job that spills each partition and passes over it once."""
    task = partial(spill_and_load, frame.schema.json(), processes)
    return feed_epochs.job(frame, task)


def spill_and_load(
    schema: str, processes: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Spills a partition as TorchDistributor does, and passes over it."""
    torch.set_num_threads(1)
    rows = 0
    with tempfile.NamedTemporaryFile() as file:
        writer = None
        for batch in batches:
            writer = writer or pa.ipc.new_stream(file, batch.schema)
            writer.write_batch(batch)
            rows += batch.num_rows
        assert writer is not None
        writer.close()
        file.flush()
        for _ in partition_loader(file.name, schema, rows, processes):
            pass
    yield pa.record_batch([pa.array([rows])], names=["rows"])


@contextmanager
def spilled(table: Path, rows: int) -> Iterator[Callable[[int], DataLoader[Any]]]:
    """Spills rows of a table; yields a function that makes a loader for them."""
    content = pq.read_table(table).slice(0, rows)
    with tempfile.NamedTemporaryFile() as file:
        with pa.ipc.new_stream(file, content.schema) as writer:
            writer.write_table(content, max_chunksize=SPILLED_ROWS)
        file.flush()
        schema = from_arrow_schema(content.schema).json()
        yield lambda processes: partition_loader(file.name, schema, rows, processes)


def partition_loader(spilled: str, schema: str, rows: int, processes: int) -> DataLoader[Any]:
    """The loader that TorchDistributor gives to functions."""
    with tempfile.NamedTemporaryFile("w") as described:
        described.write(schema)
        described.flush()
        os.environ[SPARK_PARTITION_ARROW_DATA_FILE] = spilled
        os.environ[SPARK_DATAFRAME_SCHEMA_FILE] = described.name
        return _get_spark_partition_data_loader(rows, feed_epochs.BATCH_SIZE, processes)


if __name__ == "__main__":
    main()
