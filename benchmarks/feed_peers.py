"""Rows/s from a Spark DataFrame into minibatches, against petastorm and pyspark's own loader.

The tables of feed_epochs.py; the peers get a part of the rows, enough for their rates. petastorm's
Spark converter (0.13.1, in an environment of its own, 1.7 GB, made on the first use) writes a copy
as Parquet and reads it with two threads; its first epoch is the writing and one pass, later ones
are passes shuffled in a queue of 8,192 rows. pyspark's private partition loader reads an Arrow
file that the task has spilled; it cannot shuffle. First epochs are whole Spark jobs of two tasks,
later ones what a single process passes over in a second, as in feed_epochs.py.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import feed_epochs
import harness
import pyarrow as pa
import torch
from pyspark.sql.types import StructType

PEER_ROWS = {"200,000 x 784": 200_000, "2,000,000 x 16": 400_000}
LOADER_ROWS = {"200,000 x 784": 200_000, "2,000,000 x 16": 1_000_000}
TARGETS = {"petastorm": (2.0, 10.0), "pyspark's loader": (10.0, 10.0)}
Rates = dict[str, tuple[float, float]]


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument(
        "--petastorm-environment",
        type=Path,
        default=Path.home() / ".cache" / "sparkdl-benchmarks" / "petastorm",
        help="folder of the environment for petastorm (default: %(default)s)",
    )
    chosen = harness.parse(options, repeats=3)
    torch.set_num_threads(1)
    python = petastorm_python(chosen.petastorm_environment)
    rates: dict[str, Rates] = {table: {} for table in feed_epochs.TABLES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for table, (rows, width) in feed_epochs.TABLES.items():
            feed_epochs.write(folder / table, rows, width)
            feed_epochs.write(folder / f"petastorm {width}", PEER_ROWS[table], width)
            feed_epochs.write(folder / f"loader {width}", LOADER_ROWS[table], width)
        first = feed_epochs.first_epochs(folder, chosen.repeats)
        for table, (rows, width) in feed_epochs.TABLES.items():
            later = feed_epochs.later_epochs(rows, width, folder, chosen.repeats)
            rates[table] = {
                "ours": (first[table]["ours"], later["ours"]),
                "petastorm": petastorm(
                    python, folder / f"petastorm {width}", PEER_ROWS[table], chosen.repeats
                ),
                "pyspark's loader": partition_loader(
                    folder / f"loader {width}", LOADER_ROWS[table], chosen.repeats
                ),
            }
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
        [python, script, str(folder), str(feed_epochs.BATCH_SIZE), str(repeats)],
        environment=harness.child_environment(python=python) | {"OMP_NUM_THREADS": "1"},
    )
    first, later = (
        rows / harness.show(f"petastorm, {folder.name}, {epochs}", seconds[epochs], digits=2)
        for epochs in ("first", "later")
    )
    return first, later


def petastorm_python(folder: Path) -> Path:
    """Returns the Python of petastorm's environment, which is installed if it is not there."""
    made = subprocess.run(
        [harness.FOLDER / "peers" / "environment.sh", "petastorm", folder],
        env=harness.child_environment() | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Path(made.stdout.strip())


def partition_loader(folder: Path, rows: int, repeats: int) -> tuple[float, float]:
    """Rows/s of first and later epochs of the loader that TorchDistributor's functions get."""
    os.environ.update(harness.child_environment())
    spark = harness.session(f"local-cluster[{feed_epochs.WORKERS},1,2048]", feed_epochs.CONF)
    spark.sparkContext.setLogLevel("OFF")
    frame = spark.read.parquet(str(folder))
    first: list[float] = []
    later: list[float] = []
    for turn in range(repeats + 1):
        started = time.perf_counter()
        task = partial(spill_and_load, frame.schema.json())
        seconds = [row.seconds for row in frame.mapInArrow(task, "seconds double").collect()]
        if turn:
            # The second pass is timed inside the tasks, and taken off the job's time.
            later.append(max(seconds))
            first.append(time.perf_counter() - started - max(seconds))
    spark.stop()
    name = f"pyspark's loader, {folder.name}"
    return (
        rows / harness.show(f"{name}, first", first, digits=2),
        # The tasks pass over their parts at the same time.
        rows / feed_epochs.WORKERS / harness.show(f"{name}, later, a task", later, digits=2),
    )


def spill_and_load(schema: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Spills a partition and passes over it twice; gives the seconds of the second pass."""
    import json

    from pyspark.ml.torch.data import _SparkPartitionTorchDataset
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    rows = 0
    with tempfile.NamedTemporaryFile() as spilled:
        writer = None
        for batch in batches:
            writer = writer or pa.ipc.new_stream(spilled, batch.schema)
            writer.write_batch(batch)
            rows += batch.num_rows
        assert writer is not None
        writer.close()
        spilled.flush()
        fields = StructType.fromJson(json.loads(schema))
        for _ in range(2):
            dataset = _SparkPartitionTorchDataset(spilled.name, fields, rows)
            started = time.perf_counter()
            for _ in DataLoader(dataset, batch_size=feed_epochs.BATCH_SIZE):
                pass
            seconds = time.perf_counter() - started
    yield pa.record_batch([pa.array([seconds])], names=["seconds"])


if __name__ == "__main__":
    main()
