"""How fast rows get from Spark into minibatches: ``epochs``, ``overhead``, and ``peers`` if named.

``epochs``: two tables of float32 in Parquet with a label, 200,000 rows x 784 in one array column
and 2,000,000 rows x 16 in columns of their own. On local-cluster[2,1,2048] one job fills the store
and passes over it once, as a worker does in its first epoch; another only counts the rows that
mapInArrow passes on. Later epochs run in one process on one thread: the feed's shuffled
minibatches, against indexing tensors in memory with a random permutation, and against torch's
DataLoader, which takes rows one by one by default and whole minibatches if a ``BatchSampler`` picks
them. Those three get all columns of the second table as one tensor; the feed hands them out
separately.

``overhead``: how much more a training step costs on minibatches from the feed than on a constant
one. One process on one thread trains an MLP 784-512-512-10 with batch 256, in steps of 5 ms and
more: on the feed's shuffled minibatches of 50,000 rows, and on the same minibatch again and again.

``peers``: the same tables against petastorm and pyspark's own loader. petastorm's Spark converter
(0.13.1, in an environment of its own, 1.7 GB, made on first use) gets a part of the rows, enough to
measure its rate; it writes a copy as Parquet and reads it with two threads. Its first epoch is the
writing and one pass of its ``BatchedDataLoader``; later epochs are shuffled passes of its
``InMemBatchedDataLoader``, which has read all rows before the clock starts. pyspark's private
partition loader is what functions under TorchDistributor get: it reads an Arrow file that the task
has spilled, by default in a process of its own, and cannot shuffle. First epochs are whole Spark
jobs of two tasks, later ones are passes in a single process, both in turns with ours. The loader is
measured with its defaults, and without a process of its own, which is faster.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.ml.torch.distributor import (
    SPARK_DATAFRAME_SCHEMA_FILE,
    SPARK_PARTITION_ARROW_DATA_FILE,
    _get_spark_partition_data_loader,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from sparkdl.feed.feed import Feed
from sparkdl.feed.packed import unpacked
from sparkdl.feed.schema import FeedSchema
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec
from sparkdl.replica import Replica
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.launch.worker_rows import Workers, worker_frame
from sparkdl.spark.rows.columns import input_column
from sparkdl.spark.rows.packing import small_record_batches
from sparkdl.testing import batches_of

WORKERS = 2
BATCH_SIZE = 256
SEED = 7
TABLES = {"200,000 x 784": (200_000, 784), "2,000,000 x 16": (2_000_000, 16)}
CONF = {
    "spark.executorEnv.OMP_NUM_THREADS": "1",
    "spark.sql.files.maxPartitionBytes": "4g",  # one partition per file
}
OVERHEAD_ROWS, OVERHEAD_WIDTH, STEPS = 50_000, 784, 150
PART = 400_000
"""The most rows that others get, enough to measure their rate."""
SPILLED_ROWS = 10_000
"""Rows of the record batches that Spark spills by default."""
LOADERS = {"pyspark's loader": 1, "pyspark's loader in the same process": 0}
"""The number of processes that load."""
TARGETS = {"petastorm": (2.0, 10.0), **dict.fromkeys(LOADERS, (10.0, 10.0))}


def main() -> None:
    """Measures what is asked for, and reports."""
    parts: dict[str, tuple[harness.Part, int, int]] = {
        "overhead": (overhead, 9, 3),  # first, since Spark's JVM stays
        "epochs": (epochs, 5, 2),
        "peers": (peers, 3, 1),
    }
    torch.set_num_threads(1)
    harness.measure_parts("feed", harness.parser(__doc__), parts, default=[*parts][:2])


def epochs(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures first and later epochs."""
    claims: list[harness.Claim] = []
    detail: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for table, (rows, width) in TABLES.items():
            write(folder / table, rows, width)
        first_of = first_epochs(folder, chosen.repeats, {"count": partial(job, count_rows)})
        for table, (rows, width) in TABLES.items():
            tensors = in_memory(rows, width)
            others: dict[str, Callable[[], Any]] = {
                "x[permutation]": partial(indexed, *tensors),
                "DataLoader": partial(loaded, *tensors),
                "DataLoader with BatchSampler": partial(loaded_by_batch, *tensors),
            }
            first = first_of[table]
            later = later_epochs(rows, width, folder, chosen.repeats, others)
            detail[table] = {"first_rows_per_second": first, "later_rows_per_second": later}
            compared = [
                ("first epoch / job that counts", first["ours"], first["count"], 0.85),
                ("later epochs / x[permutation]", later["ours"], later["x[permutation]"], 0.9),
            ]
            compared += [
                (f"later epochs / {loader}", later["ours"], later[loader], 3.0)
                for loader in ("DataLoader", "DataLoader with BatchSampler")
            ]
            claims += [
                harness.claim(f"{table}: {what}", ours, peer, target=target, at_least=True)
                for what, ours, peer, target in compared
            ]
    return claims, detail


def write(folder: Path, rows: int, width: int) -> None:
    """Writes a table as one Parquet file per worker."""
    folder.mkdir()
    generator = np.random.default_rng(SEED)
    for rank in range(WORKERS):
        values = generator.random((rows // WORKERS, width), dtype=np.float32)
        path = folder / f"{rank}.parquet"
        table = pa.Table.from_batches(record_batches(values))
        pq.write_table(table, path, row_group_size=20_000, use_dictionary=False)


def record_batches(values: np.ndarray) -> list[pa.RecordBatch]:
    """Values of shape (rows, width) as one array column, or as ``width`` columns if few."""
    rows, width = values.shape
    columns = {"x": values}
    if width <= 16:
        columns = {f"x{k}": np.ascontiguousarray(values[:, k]) for k in range(width)}
    return batches_of(10_000, **columns, label=np.arange(rows) % 10)


def schema_of(names: Sequence[str], width: int) -> FeedSchema:
    """The columns of a table as the estimator would feed them."""
    shape = () if width <= 16 else (UNKNOWN,)
    features = tuple(ColumnSpec(name, torch.float32, shape) for name in names if name != "label")
    return FeedSchema(features, ColumnSpec("label", torch.int64))


def first_epochs(
    folder: Path, repeats: int, others: Mapping[str, Callable[[DataFrame], Any]]
) -> dict[str, dict[str, harness.Median]]:
    """Rows/s of ours and of other jobs on each table, medians, in turns in one warm session.

    Args:
        folder: where the tables are.
        repeats: measurements of each.
        others: functions that run a ``job`` on a table's rows.
    """
    spark = quiet_session()
    result = {}
    for table, (rows, width) in TABLES.items():
        frame = spark.read.parquet(str(folder / table))
        turns = {name: partial(run, frame) for name, run in others.items()}
        task = partial(fill_and_pass, schema_of(frame.columns, width), BATCH_SIZE, 1)
        turns["ours"] = partial(fed_job, task, as_fed(frame))
        found = harness.interleave(turns, repeats=repeats, warmups=2)
        seconds = {name: [each for each, _ in jobs] for name, jobs in found.items()}
        result[table] = rates(rows, seconds, f"{table}, first epoch, {{}}")
    spark.stop()
    return result


def quiet_session() -> SparkSession:
    """A session with a slot for each worker, which says nothing."""
    os.environ.update(harness.child_environment())
    spark = harness.session(conf=CONF)
    spark.sparkContext.setLogLevel("OFF")
    return spark


def as_fed(frame: DataFrame) -> DataFrame:
    """The rows as workers get them."""
    return worker_frame(
        Workers(
            frame=frame,
            columns=tuple(input_column(frame, name, "featuresCols") for name in frame.columns),
            num_workers=WORKERS,
            shuffle="exchange",
            device="cpu",
            description="benchmark",
            network=network_of(frame.sparkSession),
        )
    )


Task = Callable[..., Iterator[pa.RecordBatch]]
"""What a job does with the record batches of a partition; yields one figure."""


def job(task: Task, frame: DataFrame) -> tuple[float, list[float]]:
    """Runs a job; returns its seconds and its tasks' figures."""
    started = time.perf_counter()
    rows = frame.mapInArrow(task, "figure double").collect()
    return time.perf_counter() - started, [row["figure"] for row in rows]


def fed_job(task: Task, frame: DataFrame) -> tuple[float, list[float]]:
    """Runs a job like ``job``, with record batches as workers get them."""
    with small_record_batches(frame.sparkSession):
        return job(task, frame)


def figure(value: float) -> pa.RecordBatch:
    """Returns what a task yields."""
    return pa.record_batch([pa.array([float(value)])], names=["figure"])


def count_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Counts what mapInArrow passes to Python."""
    yield figure(sum(batch.num_rows for batch in batches))


def fill_and_pass(
    schema: FeedSchema, batch_size: int, epochs: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Fills a store and takes every minibatch of some epochs; yields the later ones' median."""
    torch.set_num_threads(1)
    directory = Path(tempfile.gettempdir())
    with Feed(schema, batch_size=batch_size, seed=SEED, rank=0, directory=directory) as feed:
        feed.fill(map(unpacked, batches))
        seconds = [timed(feed.epoch(epoch)) for epoch in range(1, epochs + 1)]
    yield figure(np.median(seconds[1:] or seconds))


@contextmanager
def filled(values: np.ndarray, folder: Path) -> Iterator[Feed]:
    """A feed with these rows."""
    batches = record_batches(values)
    schema = schema_of(batches[0].schema.names, values.shape[1])
    with Feed(schema, batch_size=BATCH_SIZE, seed=SEED, rank=0, directory=folder) as feed:
        feed.fill(batches)
        yield feed


def later_epochs(
    rows: int,
    width: int,
    folder: Path,
    repeats: int,
    others: Mapping[str, Callable[[], Any]],
) -> dict[str, harness.Median]:
    """Rows/s of shuffled epochs of ours and of others, medians, in turns on one thread.

    Args:
        rows: the table's rows.
        width: the table's width.
        folder: where the store may write.
        repeats: measurements of each.
        others: functions that return the minibatches of an epoch.
    """
    x, _ = in_memory(rows, width)
    with filled(x.numpy(), folder) as feed:
        epochs = iter(range(2, 1000))
        turns: dict[str, Callable[[], float]] = {
            "ours": lambda: timed(feed.epoch(next(epochs))),
            **{name: lambda start=start: timed(start()) for name, start in others.items()},
        }
        seconds = harness.interleave(turns, repeats=repeats, warmups=1)
    return rates(rows, seconds, f"{rows} x {width}, later epochs, {{}}")


def rates(
    rows: int, seconds: Mapping[str, Sequence[float]], text: str
) -> dict[str, harness.Median]:
    """Shows seconds; returns rows/s."""
    harness.show_each(seconds, text)
    return {
        name: harness.Median([rows / each for each in taken], "rows/s")
        for name, taken in seconds.items()
    }


def in_memory(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A table's features and labels."""
    x = torch.rand(rows, width, generator=torch.Generator().manual_seed(SEED))
    return x, torch.arange(rows) % 10


def loaded(x: torch.Tensor, y: torch.Tensor) -> DataLoader[Any]:
    """What most people use for tensors in memory."""
    return DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)


def loaded_by_batch(x: torch.Tensor, y: torch.Tensor) -> DataLoader[Any]:
    """The same with a whole minibatch at a time."""
    rows = TensorDataset(x, y)
    sampler = BatchSampler(RandomSampler(rows), BATCH_SIZE, drop_last=False)
    return DataLoader(rows, sampler=sampler, batch_size=None)


def indexed(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The plain way to shuffle tensors in memory."""
    permutation = torch.randperm(len(x))
    for start in range(0, len(x), BATCH_SIZE):
        chosen = permutation[start : start + BATCH_SIZE]
        yield x[chosen], y[chosen]


def timed(batches: Any) -> float:
    """Seconds to take every minibatch."""
    started = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - started


def overhead(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures steps."""
    torch.manual_seed(SEED)
    model = nn.Sequential(
        nn.Linear(OVERHEAD_WIDTH, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    replica = Replica(model, partial(torch.optim.SGD, lr=0.01), nn.CrossEntropyLoss())
    rows = torch.rand(OVERHEAD_ROWS, OVERHEAD_WIDTH).numpy()
    with tempfile.TemporaryDirectory() as name, filled(rows, Path(name)) as feed:
        (constant,) = islice(feed.epoch(1), 1)
        epochs = iter(range(2, 1000))
        seconds = harness.interleave(
            {
                "constant": lambda: step(replica, repeat(constant)),
                "feed": lambda: step(replica, feed.epoch(next(epochs))),
            },
            repeats=chosen.repeats,
            warmups=1,
        )
    medians = harness.show_each(seconds, "step, {}")
    name = "step on the feed's minibatches / on a constant one"
    claim = harness.claim(name, medians["feed"], medians["constant"], target=1.03)
    return [claim], {"median_step_seconds": medians}


def step(replica: Replica, batches: Iterable[Batch]) -> float:
    """Seconds per step, over ``STEPS`` of them."""
    started = time.perf_counter()
    for batch in islice(batches, STEPS):
        replica.step(batch)
    return (time.perf_counter() - started) / STEPS


def peers(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures first and later epochs of others."""
    python = harness.peer_python("petastorm")
    found: dict[str, dict[str, tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for table, (rows, width) in TABLES.items():
            write(folder / table, rows, width)
            write(folder / f"petastorm {width}", min(rows, PART), width)
        jobs = {name: partial(loader_job, processes) for name, processes in LOADERS.items()}
        first = first_epochs(folder, chosen.repeats, jobs)
        for table, (rows, width) in TABLES.items():
            part = min(rows, PART)
            with spilled(folder / table, part) as make:
                others = {name: partial(make, processes) for name, processes in LOADERS.items()}
                later = later_epochs(rows, width, folder, chosen.repeats, others)
            found[table] = {
                name: (first[table][name], later[name] * (part / rows if name in LOADERS else 1))
                for name in ("ours", *LOADERS)
            }
            found[table]["petastorm"] = petastorm(
                python, folder / f"petastorm {width}", part, chosen.repeats
            )
    claims = [
        harness.claim(
            f"{table}: {what} / {peer}",
            measured["ours"][index],
            measured[peer][index],
            target=targets[index],
            at_least=True,
        )
        for table, measured in found.items()
        for peer, targets in TARGETS.items()
        for index, what in enumerate(("first epoch", "later epochs"))
    ]
    return claims, {"first_and_later_rows_per_second": found}


def petastorm(python: Path, folder: Path, rows: int, repeats: int) -> tuple[float, float]:
    """Rows/s of first and later epochs."""
    script = harness.FOLDER / "peers" / "petastorm_job.py"
    seconds = harness.run_child(
        [python, script, *map(str, (folder, rows, BATCH_SIZE, repeats))],
        environment=harness.child_environment(python=python) | {"OMP_NUM_THREADS": "1"},
    )
    told = rates(rows, seconds, f"{folder.name}, {{}}")
    return told["first"], told["later"]


def loader_job(processes: int, frame: DataFrame) -> tuple[float, list[float]]:
    """Runs a job that spills each partition and passes over it once."""
    return job(partial(spill_and_load, frame.schema.json(), processes), frame)


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
    yield figure(rows)


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
        return _get_spark_partition_data_loader(rows, BATCH_SIZE, processes)


if __name__ == "__main__":
    main()
