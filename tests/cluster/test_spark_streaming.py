"""A fit whose first epoch trains on rows while Spark still reads them from files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from frames import configured, estimator, frame
from models import DiesOnce, RowIds, append_line, lines, row_ids, task_rank
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

from sparkdl import ParameterAveraging
from sparkdl.errors import ConfigError, DataError
from sparkdl.feed.order import block_sizes

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH = 1024
FILES = (3060, 3040, 3030, 3020, 3010, 3000)
"""Rows of 4 KiB. Spark puts large files first, and here each is a partition."""
SHARES = ((0, 3, 5), (1, 2, 4))
"""The files of each of two workers, where each goes to the one with less, by size."""
ROWS = tuple(sum(FILES[number] for number in share) for share in SHARES)
"""Of each worker."""
BATCH = 60
BLOCK = block_sizes(1 << 30, BATCH, 4 * WIDTH + 8 + 8)[0]


def ids_of(*files: int) -> list[int]:
    """Of the rows in files, one behind the other."""
    ends = np.cumsum(FILES).tolist()
    return [row for file in files for row in range(ends[file] - FILES[file], ends[file])]


def table(path: Path, labels: Sequence[int] | None = None) -> Path:
    """Row i is (i, 1024 numbers, a class of three)."""
    path.mkdir()
    ids = np.arange(sum(FILES))
    numbers = np.random.default_rng(0).normal(size=(len(ids), WIDTH)).astype(np.float32)
    classes = ids % 3 if labels is None else np.asarray(labels)
    start = 0
    for part, size in enumerate(FILES):
        rows = slice(start, start + size)
        columns = {
            "id": ids[rows],
            "features": pa.FixedSizeListArray.from_arrays(numbers[rows].reshape(-1), WIDTH),
            "label": classes[rows],
        }
        pq.write_table(pa.table(columns), path / f"{part}.parquet")
        start += size
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table(tmp_path_factory.mktemp("rows") / "table")


@pytest.fixture(autouse=True)
def a_partition_for_each_file(spark: SparkSession) -> Iterator[None]:
    with configured(spark, {"spark.sql.files.maxPartitionBytes": "16m"}):
        yield


def read(spark: SparkSession, path: Path) -> DataFrame:
    rows = spark.read.parquet(path.as_uri())
    assert rows.rdd.getNumPartitions() == len(FILES)
    return rows


class First(nn.Module):
    """Passes the first four of many numbers on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: Tensor, *others: Tensor) -> Tensor:
        return self.inner(features[:, :4], *others)


def fit(rows: DataFrame, model: nn.Module, **changes: Any) -> Any:
    settings = {"streamFirstEpoch": True, "epochs": 2, "batchSize": BATCH, **changes}
    return estimator(model=First(model), **settings).fit(rows)


def test_there_are_several_blocks_or_the_tests_below_would_say_nothing() -> None:
    assert all(2 < rows / BLOCK < 4 for rows in ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("spreads", ["exchange", "none"])
def test_each_row_is_trained_on_once_an_epoch_the_first_in_blocks_as_they_arrive(
    spark: SparkSession, files: Path, tmp_path: Path, spreads: str
) -> None:
    fit(
        read(spark, files),
        RowIds(str(tmp_path / "ids")),
        featuresCols=["features", "id"],
        strategy=ParameterAveraging(5),
        shuffleRows=spreads,
    )
    trained = row_ids(tmp_path / "ids")
    later: dict[int, list[int]] = {}
    for rank, files_of_rank in enumerate(SHARES):
        rows = ids_of(*files_of_rank)
        first, later[rank] = trained[rank][: len(rows)], trained[rank][len(rows) :]
        assert sorted(first) == sorted(rows)
        assert sorted(first[:BLOCK]) == rows[:BLOCK] != first[:BLOCK]
        assert sorted(later[rank][:BLOCK]) != rows[:BLOCK]
        assert (sorted(later[rank]) == sorted(rows)) is (spreads == "none")
    assert sorted(later[0] + later[1]) == ids_of(*range(len(FILES)))
    assert [len(rows) for rows in later.values()] == [sum(FILES) / 2] * 2


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    "executor",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["process", "executor"],
)
def test_a_worker_that_is_killed_in_the_first_epoch_comes_back_and_no_row_is_lost(
    spark: SparkSession, files: Path, tmp_path: Path, executor: bool
) -> None:
    died = tmp_path / "died"
    model = DiesOnce(str(died), executor=executor, step=100)
    fitted = fit(read(spark, files), model)
    assert len(lines(died)) == 1
    assert [epoch.examples for epoch in fitted.history] == [sum(ROWS)] * 2


class SaysWhenItTrains(nn.Module):
    """Notes each pass of a worker."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.layer, self.path = nn.Linear(4, 3), path

    def forward(self, features: Tensor) -> Tensor:
        if task_rank() >= 0:
            append_line(self.path, str(task_rank()))
        return self.layer(features)


@pytest.mark.slow
def test_a_class_that_the_model_does_not_have_is_named_with_its_row_when_it_arrives(
    spark: SparkSession, tmp_path: Path
) -> None:
    """After others were trained on, which is what streaming costs."""
    labels = np.arange(sum(ROWS)) % 3
    labels[ids_of(5)[-1]] = 7
    rows = read(spark, table(tmp_path / "table", labels))
    for stream in (False, True):
        passes = tmp_path / f"passes-{stream}"
        with pytest.raises(DataError, match=rf"0 to 7 .*, row {FILES[5] - 1} of partition 5\)"):
            fit(rows, SaysWhenItTrains(str(passes)), streamFirstEpoch=stream)
        assert bool(lines(passes)) is stream


@pytest.mark.parametrize("spreads", ["exchange", "spark"])
@pytest.mark.slow
def test_files_that_are_too_unequal_are_spread_before_anybody_trains(
    spark: SparkSession,
    files: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spreads: str,
) -> None:
    """One worker would have two whole files, the other five rows of one; also when it goes on."""
    kept = ids_of(*SHARES[0][:2]) + ids_of(SHARES[1][0])[:5]
    parts = [ids_of(SHARES[0][0]), ids_of(SHARES[0][1]), kept[-5:]]
    wanted = " or ".join(f"id between {part[0]} and {part[-1]}" for part in parts)
    rows = read(spark, files).where(wanted)
    asked = {
        "featuresCols": ["features", "id"],
        "strategy": ParameterAveraging(5),
        "shuffleRows": spreads,
        "checkpointPath": str(tmp_path / "checkpoints"),
    }
    model = RowIds(str(tmp_path / "ids"))
    with caplog.at_level(logging.INFO, "sparkdl"):
        fit(rows, model, epochs=1, **asked)
    assert "training starts over: one task has 5 rows" in caplog.text
    trained = [len(ids) for ids in row_ids(tmp_path / "ids").values()]
    assert sum(trained) == len(kept)
    assert len(trained) == 2
    assert max(trained) - min(trained) <= 1
    longer = fit(rows, model, epochs=2, **asked)
    assert [epoch.examples for epoch in longer.history] == [len(kept)] * 2
    with pytest.raises(ConfigError, match="batch size: was"):
        fit(rows, model, epochs=2, batchSize=3, **asked)


def test_rows_that_have_to_be_shuffled_are_read_first_with_a_warning(
    spark: SparkSession, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = read(spark, files).where("id < 500").coalesce(1)
    with caplog.at_level(logging.WARNING, "sparkdl"):
        fitted = fit(rows, nn.Linear(4, 3))
    assert "rows are read before the first epoch: the DataFrame has 1 part" in caplog.text
    assert [epoch.examples for epoch in fitted.history] == [500, 500]


@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_that_come_from_elsewhere_are_read_first_with_a_warning(
    spark: SparkSession, caplog: pytest.LogCaptureFixture, shuffled: bool
) -> None:
    rows = frame(spark, rows=60, partitions=2)
    with caplog.at_level(logging.WARNING, "sparkdl"):
        fit(rows.repartition(2) if shuffled else rows, nn.Linear(4, 3), batchSize=5)
    assert "they do not come straight from files" in caplog.text
