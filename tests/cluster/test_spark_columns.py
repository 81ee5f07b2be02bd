"""Every type of column through fit and transform on real executors, against numpy."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections import Counter
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import PIL.Image
import pytest
import torch
from every_row import every_row
from frames import estimator, frame, frame_of_sizes, no_jobs
from models import RowIds, row_ids
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from torch import Tensor, nn

from sparkdl import ParameterAveraging, TorchEstimator, TorchModel
from sparkdl.errors import ConfigError, DataError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 24
EXPECTED: dict[str, tuple[str, tuple[int, ...]]] = {
    "flag": ("int64", ()),
    "byte": ("int64", ()),
    "short": ("int64", ()),
    "int": ("float16", ()),
    "long": ("int64", ()),
    "float": ("float32", ()),
    "double": ("float32", ()),
    "array": ("bfloat16", (4,)),
    "flags": ("int64", (2,)),
    "square": ("float32", (2, 2)),
    "nested": ("int64", (2, 3)),
    "vector": ("float32", (3,)),
    "raw": ("float16", (3,)),
    "photo": ("uint8", (3, 2, 2)),
    "image": ("uint8", (3, 2, 2)),
}
SHAPES = {n: list(shape) for n, (_, shape) in EXPECTED.items() if len(shape) > 1 or n == "raw"}
DTYPES = {"int": "float16", "array": "bfloat16", "raw": "float16"}
IMAGE = T.StructType(
    [
        T.StructField("origin", T.StringType()),
        *[T.StructField(n, T.IntegerType()) for n in ("height", "width", "nChannels", "mode")],
        T.StructField("data", T.BinaryType()),
    ]
)


class SumOfAll(nn.Module):
    """One number a row: the sum of everything in it, once it is what was declared."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, columns: dict[str, Tensor]) -> Tensor:
        for name, (dtype, shape) in EXPECTED.items():
            found = columns[name]
            assert (str(found.dtype), found.shape[1:]) == (f"torch.{dtype}", shape), name
        sums = [values.double().reshape(len(values), -1).sum(1) for values in columns.values()]
        return (self.slope * torch.stack(sums).sum(0)).float()


def png(pixels: np.ndarray) -> bytes:
    target = io.BytesIO()
    PIL.Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


def row_of(i: int) -> tuple[dict[str, Any], float]:
    """A row, and the sum of everything in it."""
    pixels = np.arange(i, i + 12, dtype=np.uint8).reshape(2, 2, 3)
    raw = np.array([i, 0.5, -1], dtype=np.float16)
    sparse = i % 2 == 0
    row = {
        "id": i,
        "flag": i % 3 == 0,
        "byte": i % 100,
        "short": 300 + i,
        "int": i - 7,
        "long": 2**20 + i,
        "float": i / 4,
        "double": -i / 8,
        "array": [float(i), 1.0, 2.0, 0.5],
        "flags": [True, i % 2 == 0],
        "square": [1.0, float(i), 0.0, 2.0],
        "nested": [[1, 2, i], [3, -4, 5]],
        "vector": Vectors.sparse(3, [1], [i / 2]) if sparse else Vectors.dense([1, 0, i]),
        "raw": raw.tobytes(),
        "photo": png(pixels),
        "image": ("here", 2, 2, 3, 16, pixels.tobytes()),
        "y": 0.0,
    }
    sums = [
        float(np.sum(row[name]))
        for name in EXPECTED
        if name not in ("vector", "raw", "photo", "image")
    ]
    sums += [row["vector"].toArray().sum(), float(raw.sum())]
    return row, sum(sums) + 2 * float(pixels.sum())


@pytest.fixture(scope="module")
def everything(spark: SparkSession) -> DataFrame:
    types: dict[str, T.DataType] = {
        "id": T.LongType(),
        "flag": T.BooleanType(),
        "byte": T.ByteType(),
        "short": T.ShortType(),
        "int": T.IntegerType(),
        "long": T.LongType(),
        "float": T.FloatType(),
        "double": T.DoubleType(),
        "array": T.ArrayType(T.DoubleType()),
        "flags": T.ArrayType(T.BooleanType()),
        "square": T.ArrayType(T.FloatType()),
        "nested": T.ArrayType(T.ArrayType(T.ShortType())),
        "vector": VectorUDT(),
        "raw": T.BinaryType(),
        "photo": T.BinaryType(),
        "image": IMAGE,
        "y": T.FloatType(),
    }
    schema = T.StructType([T.StructField(name, kind) for name, kind in types.items()])
    rows = [tuple(row_of(i)[0][name] for name in types) for i in range(ROWS)]
    return spark.createDataFrame(rows, schema).repartition(3)


def sum_estimator(**changes: Any) -> TorchEstimator:
    settings: dict[str, Any] = {
        "model": SumOfAll(),
        "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.0),
        "featuresCols": list(EXPECTED),
        "featuresAs": "dict",
        "labelCol": "y",
        "columnShapes": SHAPES,
        "columnDtypes": DTYPES,
        "imageCols": ["photo"],
        "outputType": "raw",
    }
    return estimator(**{**settings, **changes})


@pytest.mark.nightly
@pytest.mark.versions
def test_every_type_arrives_as_declared_in_fit_and_in_transform(
    everything: DataFrame, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sparkdl")
    model = sum_estimator().fit(everything)
    said = [r.getMessage() for r in caplog.records if "becomes" in r.getMessage()]
    assert len(said) == len(EXPECTED) + 1
    assert "column 'double' (double) becomes torch.float32" in said

    expected = [row_of(i)[1] for i in range(ROWS)]
    path = str(tmp_path / "model")
    model.save(path)
    for each in (model, TorchModel.load(path, trust=True)):
        found = each.transform(everything).select("id", "prediction").orderBy("id").collect()
        assert [row.prediction for row in found] == pytest.approx(expected, rel=1e-6)


@pytest.mark.versions
def test_a_bad_row_is_named_by_column_partition_and_row(everything: DataFrame) -> None:
    photo = F.when(F.col("id") == 5, F.unhex(F.lit("00ff"))).otherwise(F.col("photo"))
    told = rf"(?s)column 'photo' has 1 row of {ROWS}.*of partition.*not a valid image"
    with pytest.raises(DataError, match=told):
        sum_estimator().fit(everything.withColumn("photo", photo))


def test_features_that_are_no_numbers_are_refused_or_kept_as_asked(spark: SparkSession) -> None:
    nan, infinity = (F.array(*[F.lit(float(each))] * 4) for each in ("nan", "infinity"))
    rows = frame(spark).withColumn(
        "features",
        F.when(F.col("id") == 31, nan)
        .when(F.col("id") == 32, infinity)
        .otherwise(F.col("features")),
    )
    with pytest.raises(DataError, match=r"'features' holds NaN or infinity in 2 of 60 .*row \d+"):
        estimator().fit(rows)
    model = estimator(model=IgnoresNan(), handleInvalid="keep").fit(rows)
    assert model.history[0].examples == 60


class IgnoresNan(nn.Module):
    """4 numbers to 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features.nan_to_num(0.0, 0.0, 0.0))


@every_row(
    ({"columnDtypes": {"other": "int8"}}, "columnDtypes names 'other'"),
    ({"imageCols": ["features"]}, "encoded images are binary"),
    ({"featuresCol": "bytes"}, "is binary: declare its bytes"),
    ({"featuresCol": "bytes", "columnDtypes": {"bytes": "int8"}}, "needs a declared shape"),
    ({"featuresCol": "grid"}, "columnShapes={'grid': [..., ...]}"),
    ({"featuresCol": "id", "columnShapes": {"id": [2]}}, "whose rows have 0 dimensions"),
    ({"weightCol": "features"}, "must be a number"),
    ({"validationIndicatorCol": "id"}, "must be boolean"),
)
def test_columns_that_cannot_be_fed_are_refused_before_any_job(
    spark: SparkSession, changes: dict[str, Any], fragment: str
) -> None:
    rows = frame(spark).select(
        "*", F.encode(F.lit("a"), "utf-8").alias("bytes"), F.array("features").alias("grid")
    )
    with no_jobs(spark), pytest.raises((DataError, ConfigError), match=re.escape(fragment)):
        estimator(**changes).fit(rows)


def test_a_minibatch_that_no_worker_can_fill_is_refused_by_what_each_will_have(
    spark: SparkSession,
) -> None:
    rows = frame_of_sizes(spark, [50, 3])
    fitted = estimator(dropLast=True, batchSize=27).fit(rows)
    assert fitted.history[0].examples == 27
    with pytest.raises(DataError, match="have at most 27 rows, but a minibatch has 28"):
        estimator(dropLast=True, batchSize=28).fit(rows)


@pytest.mark.gate
@pytest.mark.versions
def test_reshuffled_rows_are_trained_on_once_an_epoch_on_real_executors(
    spark: SparkSession, tmp_path: Any
) -> None:
    trace = tmp_path / "ids"
    estimator(
        strategy=ParameterAveraging(2),
        model=RowIds(str(trace)),
        featuresCols=["features", "id"],
        epochs=3,
        reshuffleEvery=1,
        numWorkers=3,
        validationIndicatorCol="held",
    ).fit(frame(spark, rows=70).withColumn("held", F.col("id") % 10 == 3))
    seen = row_ids(trace)
    # forward passes: three epochs of training, or three validations
    assert Counter(i for ids in seen.values() for i in ids) == dict.fromkeys(range(70), 3)
    ranks = [sum(i in ids for ids in seen.values()) for i in range(70)]
    assert all(ranks[i] == 1 for i in range(3, 70, 10))
    assert sum(where > 1 for where in ranks) > 30


@pytest.mark.versions
def test_weights_validation_and_transform_work_together(spark: SparkSession) -> None:
    rows = frame(spark).select(
        "*", (F.col("id") % 4).cast("double").alias("weight"), (F.col("id") % 5 == 0).alias("held")
    )
    model = estimator(
        weightCol="weight", validationIndicatorCol="held", epochs=2, dropLast=True, batchSize=7
    ).fit(rows)
    assert [epoch.examples for epoch in model.history] == [42, 42]
    assert [epoch.validation_examples for epoch in model.history] == [12, 12]
    assert all((epoch.validation_loss or 0) > 0 for epoch in model.history)
    predictions = model.transform(rows).select("prediction").collect()
    assert {row.prediction for row in predictions} <= {0.0, 1.0, 2.0}
