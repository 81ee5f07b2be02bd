"""A type of column that sparkdl does not know, added by what is in this file and nothing else."""

from __future__ import annotations

import sys
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from frames import estimator
from pyspark import cloudpickle as pyspark_cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from torch import Tensor, nn

from sparkdl.checkpoint.module_files import SavedModule, read_module, write_module
from sparkdl.encodings import Encoding, encoding, known
from sparkdl.errors import ConfigError, DataError
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import Feed
from sparkdl.feed.statistics.shards import DataStatistics, check_statistics
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.columns import _as_it_comes
from sparkdl.spark.rows import column_types
from sparkdl.spark.rows.column_types import RowType, register_column_type

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pyspark_cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Days(Encoding):
    """Dates, as days since 1970."""

    name = "days"

    def takes(self, kind: pa.DataType) -> bool:
        return bool(pa.types.is_date32(kind))

    def decode(
        self, values: pa.Array, shape: encoding.Shape, dtype: torch.dtype
    ) -> encoding.DecodedRows:
        return values.cast(pa.int32()), None


def days_in(kind: T.DataType) -> RowType | None:
    return RowType(integral=True) if isinstance(kind, T.DateType) else None


DAYS = Days()
DAY = ColumnSpec("day", torch.float32, (), DAYS)
SCHEMA = FeedSchema((DAY,), ColumnSpec("y", torch.int64))
DATES = [date(1969, 12, 30), date(1970, 1, 1), date(2024, 2, 29), date(9999, 12, 31)]
NUMBERS = (np.array(DATES, "datetime64[D]") - np.datetime64("1970-01-01")).astype(float)


@pytest.fixture
def days(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dates are known for the length of a test."""
    monkeypatch.setattr(known, "_known", dict(known._known))
    monkeypatch.setattr(column_types, "_types", dict(column_types._types))
    register_column_type(DAYS, days_in)


def open_feed(directory: Path) -> Feed:
    return Feed(SCHEMA, batch_size=2, seed=1, rank=0, directory=directory)


def rows_of(*dates: date | None) -> list[pa.RecordBatch]:
    columns = [pa.array(dates, pa.date32()), pa.array(range(len(dates)))]
    return [pa.record_batch(columns, ["day", "y"])]


def test_arrow_rows_become_minibatches(tmp_path: Path) -> None:
    with open_feed(tmp_path) as feed:
        feed.fill(rows_of(*DATES))
        found: dict[int, float] = {}
        for batch in feed.epoch(1):
            assert isinstance(batch.features, tuple)
            assert isinstance(batch.targets, Tensor)
            found |= dict(zip(batch.targets.tolist(), batch.features[0].tolist(), strict=True))
    assert [found[row] for row in range(4)] == NUMBERS.tolist()


def test_a_null_is_counted_and_named_with_its_place(tmp_path: Path) -> None:
    with open_feed(tmp_path) as feed:
        statistics = DataStatistics.of([feed.fill(rows_of(DATES[0], None, DATES[1]))])
    with pytest.raises(DataError, match=r"'day' has 1 null.*row 1 of partition 0"):
        check_statistics(statistics, SCHEMA.columns)


def test_a_model_as_a_function_takes_them() -> None:
    rows = pa.array(DATES, pa.date32())
    assert _as_it_comes(DAY, rows) == DAY
    as_numbers = ColumnSpec("day", torch.float32)
    with pytest.raises(DataError, match="a column of date32"):
        _as_it_comes(as_numbers, rows)


@pytest.mark.usefixtures("days")
def test_a_model_as_a_function_tells_them_from_numbers_once_they_are_known() -> None:
    as_numbers = ColumnSpec("day", torch.float32)
    assert _as_it_comes(as_numbers, pa.array(DATES, pa.date32())) == DAY
    assert _as_it_comes(DAY, pa.array(NUMBERS)) == as_numbers


@pytest.mark.usefixtures("days")
def test_a_saved_model_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(1, 1)
    write_module(SavedModule(module, module, (DAY,), "unknown", {None: 1}, []), tmp_path)
    assert read_module(tmp_path, trust=True).features == (DAY,)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="'days' is not an encoding: there are numbers, vector"):
        read_module(tmp_path, trust=True)


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, day: Tensor) -> Tensor:
        assert day.dtype == torch.int64
        return self.slope * day.float()


@pytest.mark.slow
@pytest.mark.usefixtures("days")
def test_a_model_is_fitted_and_predicts_on_executors(spark: SparkSession) -> None:
    rows = spark.range(0, 20, 1, 2).select(
        F.date_add(F.lit(date(2024, 2, 20)), F.col("id").cast("int")).alias("day"),
        F.lit(0.0).cast("float").alias("y"),
    )
    settings: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": partial(torch.optim.SGD, lr=0.0)}
    columns = {"featuresCol": "day", "labelCol": "y", "outputType": "raw"}
    model = estimator(model=Slope(), **settings, **columns).fit(rows)
    predicted = model.transform(rows).withColumn("called", model.udf()("day"))
    found = predicted.orderBy("day").collect()
    first = (date(2024, 2, 20) - date(1970, 1, 1)).days
    assert [row.prediction for row in found] == list(range(first, first + 20))
    assert [row.called for row in found] == [row.prediction for row in found]
