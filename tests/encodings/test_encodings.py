"""Encodings by name, those of one's own, and scales."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from frames import estimator
from pyspark import cloudpickle as pyspark_cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from torch import Tensor, nn

from sparkdl.checkpoint.module_files import SavedModule, read_module, write_module
from sparkdl.encodings import IMAGE, Encoding, encoding, known, named, register
from sparkdl.encodings.scale import Scale
from sparkdl.errors import ConfigError, DataError
from sparkdl.feed.feed import Feed
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import DataStatistics, check_statistics
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.columns import _as_it_comes
from sparkdl.spark.rows import columns

NAMES = ["numbers", "vector", "bytes", "image", "pixels"]
NAMES += ["image cropped", "image padded", "image stretched"]


@every("name", ["vectors", "", None, 3, ["numbers"]])
def test_other_names_are_refused_with_those_that_there_are(name: Any) -> None:
    with pytest.raises(ValueError, match=f"is not an encoding: there are {', '.join(NAMES)}"):
        named(name)


@every("name", NAMES)
def test_a_name_stays_what_it_is_and_a_column_that_has_travelled_equals_the_one_that_was_sent(
    name: str,
) -> None:
    assert named(name).name == name
    sent = ColumnSpec("x", torch.float32, (3, 2, 2), named(name))
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert sent != ColumnSpec("x", torch.float32, (3, 2, 2), named(NAMES[NAMES.index(name) - 1]))


def cell_of_a_notebook(called: str = "days") -> Encoding:
    """What running it defines; each time another class of one name."""

    class Days(Encoding):
        name = called

        def takes(self, kind: pa.DataType) -> bool:
            return bool(pa.types.is_date32(kind))

        def decode(self, values: pa.Array, shape: Any, dtype: torch.dtype) -> Any:
            return values, None

    return Days()


def test_no_encoding_takes_the_name_of_another() -> None:
    other = cell_of_a_notebook("vector")
    with pytest.raises(ValueError, match="another encoding named 'vector'"):
        register(other)
    register(named("vector"))
    assert named("vector") is not other


def test_a_cell_that_is_run_again_replaces_what_it_has_defined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known, "_known", dict(known._known))
    for _ in range(2):
        days = cell_of_a_notebook()
        register(days)
        assert named("days") is days


cloudpickle.register_pickle_by_value(sys.modules[__name__])
pyspark_cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Days(Encoding):
    """Dates, as days since 1970."""

    name = "days"

    def takes(self, kind: pa.DataType) -> bool:
        return bool(pa.types.is_date32(kind))

    def decode(self, values: pa.Array, shape: Any, dtype: torch.dtype) -> encoding.DecodedRows:
        return values.cast(pa.int32()), None


DAYS = Days()
DAY = ColumnSpec("day", torch.float32, (), DAYS)
SCHEMA = FeedSchema((DAY,), ColumnSpec("y", torch.int64))
DATES = [date(1969, 12, 30), date(1970, 1, 1), date(2024, 2, 29), date(9999, 12, 31)]
NUMBERS = (np.array(DATES, "datetime64[D]") - np.datetime64("1970-01-01")).astype(float)


@pytest.fixture
def days(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dates are known for the length of a test."""
    monkeypatch.setattr(known, "_known", dict(known._known))
    others = columns.recognized

    def recognized(kind: T.DataType) -> tuple[Encoding, bool, int | None] | None:
        return (DAYS, True, 0) if isinstance(kind, T.DateType) else others(kind)

    monkeypatch.setattr(columns, "recognized", recognized)
    register(DAYS)


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


@pytest.mark.nightly
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


PIXELS = np.arange(2 * 3 * 16 * 8, dtype=np.int64).astype(np.uint8).reshape(2, 3, 16, 8)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def by_channel(numbers: tuple[float, ...], dtype: type) -> np.ndarray:
    return np.array(numbers, dtype)[:, None, None]


@every_row((torch.float32, np.float32), (torch.float64, np.float64))
def test_each_range_is_computed_in_the_precision_of_the_floats(
    dtype: torch.dtype, exact: type
) -> None:
    rows = torch.from_numpy(PIXELS)
    as_is = PIXELS.astype(exact)
    unit = as_is / exact(255)
    normal = (unit - by_channel(MEAN, exact)) / by_channel(STD, exact)
    for scale, expected in (
        (Scale(dtype, "0..255"), as_is),
        (Scale(dtype, "0..1"), unit),
        (Scale(dtype, "0..1", MEAN, STD), normal),
    ):
        floats = scale.floats(rows)
        assert floats.dtype == dtype
        assert np.array_equal(floats.numpy(), expected)
    assert np.array_equal(rows.numpy(), PIXELS)


@every("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    rows = torch.from_numpy(PIXELS)
    exact = Scale(torch.float32, "0..1", MEAN, STD).floats(rows)
    assert torch.equal(Scale(dtype, "0..1", MEAN, STD).floats(rows), exact.to(dtype))


def test_a_minibatch_has_floats_of_features_and_labels_though_rows_are_bytes() -> None:
    picture = ColumnSpec("x", torch.uint8, (3, 16, 8), IMAGE, scale=Scale(torch.float32))
    schema = FeedSchema((picture,), replace(picture, name="y"))
    rows = torch.from_numpy(PIXELS)
    batch = schema.batch([rows, rows], last=True)
    for found in (batch.features[0], batch.targets):
        assert torch.equal(found, rows.float().div(255))
