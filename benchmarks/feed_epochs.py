"""How fast rows get from Spark into a worker's store, and from there into minibatches.

Two tables of float32 in Parquet with a label, 200,000 rows x 784 in one array column and 2,000,000
rows x 16 in columns of their own. On local-cluster[2,1,2048] one job fills the store and passes
over it once, as a worker does in its first epoch; another passes over the rows while it fills the
store, as a worker does that streams its first epoch; a third only counts the rows that mapInArrow
passes on. Later epochs run in one process on one thread: the feed's shuffled minibatches, against
indexing tensors in memory with a random permutation, and against torch's DataLoader, which takes
rows one by one by default and whole minibatches if a ``BatchSampler`` picks them. Those three get
all columns of the second table as one tensor; the feed hands them out separately.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.sql import DataFrame
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import Feed, FeedOptions
from sparkdl.feed.record_batches.packed import unpacked
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.launch.worker_rows import Workers, worker_frame
from sparkdl.spark.rows.columns import input_column
from sparkdl.spark.rows.delivery import Delivery
from sparkdl.spark.rows.packing import small_record_batches

WORKERS = 2
BATCH_SIZE = 256
SEED = 7
TABLES = {"200,000 x 784": (200_000, 784), "2,000,000 x 16": (2_000_000, 16)}
CONF = {
    "spark.executor.memory": "2048m",
    "spark.ui.enabled": "false",
    "spark.executorEnv.OMP_NUM_THREADS": "1",
    "spark.sql.files.maxPartitionBytes": "4g",  # one partition per file
}


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=5, quick_repeats=2)
    torch.set_num_threads(1)
    claims: list[harness.Claim] = []
    detail: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for table, (rows, width) in TABLES.items():
            write(folder / table, rows, width)
        first = first_epochs(folder, chosen.repeats, {"count": count})
        for table, (rows, width) in TABLES.items():
            tensors = in_memory(rows, width)
            others = {
                "x[permutation]": partial(indexed, *tensors),
                "DataLoader": partial(loaded, *tensors),
                "DataLoader with BatchSampler": partial(loaded_by_batch, *tensors),
            }
            later = later_epochs(rows, width, folder, chosen.repeats, others)
            detail[table] = {"first_rows_per_second": first[table], "later_rows_per_second": later}
            claims += [
                harness.Claim(
                    name=f"{table}: first epoch / job that counts",
                    ratio=first[table]["ours"] / first[table]["count"],
                    target=0.85,
                    at_least=True,
                ),
                harness.Claim(
                    name=f"{table}: streamed first epoch / job that counts",
                    ratio=first[table]["streamed"] / first[table]["count"],
                    target=0.85,
                    at_least=True,
                ),
                harness.Claim(
                    name=f"{table}: later epochs / x[permutation]",
                    ratio=later["ours"] / later["x[permutation]"],
                    target=0.9,
                    at_least=True,
                ),
                *(
                    harness.Claim(
                        name=f"{table}: later epochs / {loader}",
                        ratio=later["ours"] / later[loader],
                        target=3.0,
                        at_least=True,
                    )
                    for loader in ("DataLoader", "DataLoader with BatchSampler")
                ),
            ]
    harness.report("feed_epochs", claims, detail)


def write(folder: Path, rows: int, width: int) -> None:
    """Writes a table as one Parquet file per worker."""
    folder.mkdir()
    generator = np.random.default_rng(SEED)
    for rank in range(WORKERS):
        table = arrow_table(generator.random((rows // WORKERS, width), dtype=np.float32))
        pq.write_table(
            table, folder / f"{rank}.parquet", row_group_size=20_000, use_dictionary=False
        )


def arrow_table(values: np.ndarray) -> pa.Table:
    """Values of shape (rows, width) as one array column, or as ``width`` columns if few."""
    rows, width = values.shape
    label = np.arange(rows) % 10
    if width <= 16:
        columns = {f"x{k}": np.ascontiguousarray(values[:, k]) for k in range(width)}
        return pa.table({**columns, "label": label})
    offsets = np.arange(0, rows * width + 1, width, dtype=np.int32)
    lists = pa.ListArray.from_arrays(offsets, values.reshape(-1))
    return pa.table({"x": lists, "label": label})


def schema_of(names: Sequence[str], width: int) -> FeedSchema:
    """The columns of a table as the estimator would feed them."""
    shape = () if width <= 16 else (UNKNOWN,)
    features = tuple(ColumnSpec(name, torch.float32, shape) for name in names if name != "label")
    return FeedSchema(features, ColumnSpec("label", torch.int64))


def first_epochs(
    folder: Path, repeats: int, others: Mapping[str, Callable[[DataFrame], float]]
) -> dict[str, dict[str, float]]:
    """Rows/s of ours and of other jobs on each table, medians, in turns in one warm session.

    Args:
        folder: where the tables are.
        repeats: measurements of each.
        others: functions that run on a table's rows and return their seconds.
    """
    os.environ.update(harness.child_environment())
    spark = harness.session(f"local-cluster[{WORKERS},1,2048]", CONF)
    spark.sparkContext.setLogLevel("OFF")
    result = {}
    for table, (rows, width) in TABLES.items():
        frame = spark.read.parquet(str(folder / table))
        columns = tuple(input_column(frame, name, "featuresCols") for name in frame.columns)
        workers = Workers(
            frame=frame,
            columns=columns,
            num_workers=WORKERS,
            delivery=Delivery(),
            device="cpu",
            description="benchmark",
            network=network_of(spark),
        )
        fed = worker_frame(workers, SEED)
        schema = schema_of(frame.columns, width)
        turns = {name: partial(run, frame) for name, run in others.items()}
        turns["ours"] = partial(fed_job, fed, partial(fill_and_pass, schema))
        turns["streamed"] = partial(fed_job, fed, partial(pass_on_arrival, schema))
        seconds = harness.interleave(turns, repeats=repeats, warmups=2)
        result[table] = {
            name: rows / harness.show(f"{table}, first epoch, {name}", values, digits=2)
            for name, values in seconds.items()
        }
    spark.stop()
    return result


def job(frame: DataFrame, function: Callable[..., Iterator[pa.RecordBatch]]) -> float:
    """Runs a job on every partition; returns its seconds."""
    started = time.perf_counter()
    frame.mapInArrow(function, "rows bigint").collect()
    return time.perf_counter() - started


def count(frame: DataFrame) -> float:
    """A job that only counts."""
    return job(frame, count_rows)


def fed_job(frame: DataFrame, function: Callable[..., Iterator[pa.RecordBatch]]) -> float:
    """Runs a job like ``job``, with record batches as workers get them."""
    with small_record_batches(frame.sparkSession):
        return job(frame, function)


def count_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Counts what mapInArrow passes to Python."""
    rows = sum(batch.num_rows for batch in batches)
    yield pa.record_batch([pa.array([rows])], names=["rows"])


def fill_and_pass(
    schema: FeedSchema, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Fills a store and takes every minibatch of the first epoch."""
    torch.set_num_threads(1)
    directory = Path(tempfile.gettempdir())
    with Feed(schema, batch_size=BATCH_SIZE, seed=SEED, rank=0, directory=directory) as feed:
        feed.fill(map(unpacked, batches))
        rows = sum(batch.examples for batch in feed.epoch(1))
    yield pa.record_batch([pa.array([rows])], names=["rows"])


def pass_on_arrival(
    schema: FeedSchema, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Takes every minibatch of the first epoch while it fills a store."""
    torch.set_num_threads(1)
    directory = Path(tempfile.gettempdir())
    options = FeedOptions(stream_first_epoch=True)
    with Feed(
        schema, batch_size=BATCH_SIZE, seed=SEED, rank=0, directory=directory, options=options
    ) as feed:
        feed.read_first(map(unpacked, batches))
        rows = sum(batch.examples for batch in feed.arriving(lambda shard: None))
    yield pa.record_batch([pa.array([rows])], names=["rows"])


def later_epochs(
    rows: int,
    width: int,
    folder: Path,
    repeats: int,
    others: Mapping[str, Callable[[], Any]],
) -> dict[str, float]:
    """Rows/s of shuffled epochs of ours and of others, medians, in turns on one thread.

    Args:
        rows: the table's rows.
        width: the table's width.
        folder: where the store may write.
        repeats: measurements of each.
        others: functions that return the minibatches of an epoch.
    """
    x, _ = in_memory(rows, width)
    table = arrow_table(x.numpy())
    schema = schema_of(table.column_names, width)
    with Feed(schema, batch_size=BATCH_SIZE, seed=SEED, rank=0, directory=folder) as feed:
        feed.fill(table.to_batches(max_chunksize=10_000))
        epochs = iter(range(2, 1000))
        turns: dict[str, Callable[[], float]] = {
            "ours": lambda: timed(feed.epoch(next(epochs))),
            **{name: lambda start=start: timed(start()) for name, start in others.items()},
        }
        seconds = harness.interleave(turns, repeats=repeats, warmups=1)
    return {
        name: rows / harness.show(f"{rows} x {width}, later epochs, {name}", values, digits=3)
        for name, values in seconds.items()
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


if __name__ == "__main__":
    main()
