"""Columns of images, and rows that are delivered as they are."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every, every_row
from frames import estimator, in_files
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl import TorchModel
from sparkdl.encodings import BYTES, IMAGE, NUMBERS, PIXELS
from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.scale import Scale
from sparkdl.errors import ConfigError
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.rows.column_overrides import ColumnOverrides, ImageColumns
from sparkdl.spark.rows.columns import InputColumn
from sparkdl.spark.rows.converters import image_scale, image_size

PHOTO = InputColumn("x", "binary", True, BYTES, None)
STRUCT = InputColumn("x", "struct<...>", True, PIXELS, 3)
ARRAY = InputColumn("x", "array<double>", False, NUMBERS, 1)


@every("given", [(224, 160), [224.0, 160], np.array([224, 160]), torch.tensor([224, 160])])
def test_sizes_become_whole_numbers_that_are_json(given: Any) -> None:
    assert json.loads(json.dumps(image_size(given))) == [224, 160]


@every("given", [224, (224,), (224, 0), (3, 224, 224), (224, 1.5), "224", (True, 224), (224, None)])
def test_other_sizes_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"imageSize must give the height and the width"):
        image_size(given)


@every_row(
    (None, None),
    ("0..1", "0..1"),
    ("0..255", "0..255"),
    ((0.5, 0.25), [[0.5], [0.25]]),
    (([0.4, 0.5, 0.6], np.float32(0.5)), [[0.4, 0.5, 0.6], [0.5]]),
    (np.array([[0.5, 0.5, 0.5], [1, 1, 1]]), [[0.5] * 3, [1.0] * 3]),
)
def test_scales_are_kept_as_json_and_converted_again_to_the_same(given: Any, held: Any) -> None:
    assert image_scale(given) == held
    assert image_scale(json.loads(json.dumps(held))) == held


@every(
    "given",
    [
        "0-1",
        1,
        (0.5,),
        (0.5, 0.0),
        (0.5, -1),
        ([0.5, None], 1),
        (float("nan"), 1),
        ("a", 1),
        ([], 1),
        (0.5, []),
        (0.1, 0.2, 0.3),
        ([[0.5]], 1),
    ],
)
def test_other_scales_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"imageScale must be '0\.\.1', '0\.\.255', or"):
        image_scale(given)


def spec(
    column: InputColumn = PHOTO,
    shape: list[int] | None = None,
    dtype: str | None = None,
    target: torch.dtype | None = None,
    **images: Any,
) -> ColumnSpec:
    shapes = None if shape is None else {"x": shape}
    dtypes = None if dtype is None else {"x": dtype}
    named = {f"image_{name}": value for name, value in images.items()}
    overrides = ColumnOverrides(shapes, dtypes, ["x"], **named)
    return overrides.spec(column, torch.float32, target=target)


@every_row(
    ({"size": [8, 9]}, ((3, 8, 9), FITS["crop"], torch.uint8, None)),
    ({"size": [8, 9], "fit": "pad"}, ((3, 8, 9), FITS["pad"], torch.uint8, None)),
    (
        {"size": [8, 9], "shape": [1, 8, 9], "fit": "stretch"},
        ((1, 8, 9), FITS["stretch"], torch.uint8, None),
    ),
    ({"size": [8, 9], "column": STRUCT}, ((3, 8, 9), FITS["crop"], torch.uint8, None)),
    ({"shape": [3, 8, 9]}, ((3, 8, 9), IMAGE, torch.uint8, None)),
    ({"shape": [3, 8, 9], "column": STRUCT}, ((3, 8, 9), PIXELS, torch.uint8, None)),
    (
        {"shape": [1, 8, 9], "scale": "0..1", "column": STRUCT},
        ((1, 8, 9), PIXELS, torch.uint8, Scale(torch.float32)),
    ),
    (
        {"size": [8, 9], "scale": "0..255", "dtype": "float16"},
        ((3, 8, 9), FITS["crop"], torch.uint8, Scale(torch.float16, "0..255")),
    ),
    (
        {"size": [8, 9], "scale": [[0.5], [0.1, 0.2, 0.3]]},
        (
            (3, 8, 9),
            FITS["crop"],
            torch.uint8,
            Scale(torch.float32, "0..1", (0.5, 0.5, 0.5), (0.1, 0.2, 0.3)),
        ),
    ),
    ({"size": [8, 9], "dtype": "float32"}, ((3, 8, 9), FITS["crop"], torch.float32, None)),
    ({"size": [8, 9], "target": torch.float32}, ((3, 8, 9), FITS["crop"], torch.float32, None)),
    (
        {"size": [8, 9], "target": torch.float32, "scale": "0..1"},
        ((3, 8, 9), FITS["crop"], torch.uint8, Scale(torch.float32)),
    ),
)
def test_a_column_becomes_what_was_declared(given: dict[str, Any], expected: Any) -> None:
    found = spec(**given)
    assert (found.row_shape, found.encoding, found.dtype, found.scale) == expected


@every_row(
    ({"size": [8, 9], "shape": [3, 9, 8]}, r"columnShapes gives \[3, 9, 8\] .* must agree"),
    ({"size": [8, 9], "shape": [2, 8, 9]}, "1, 3 or 4 channels"),
    ({"fit": "pad"}, r"imageFit='pad' .* set imageSize"),
    ({}, r"columnShapes=\{'x': \[channels, height, width\]\}, or imageCols and imageSize"),
    ({"size": [8, 9], "column": ARRAY}, "which has type array<double>; encoded images are"),
    ({"size": [8, 9], "scale": "0..1", "dtype": "uint8"}, "imageScale makes floats .* uint8"),
    ({"size": [8, 9], "scale": [[0.5, 0.5], [1.0]]}, "imageScale has 2 numbers, .* 3 channels"),
    ({"size": [8, 9], "target": torch.int64}, "imageSize would blend .* label column 'x'"),
)
def test_what_contradicts_itself_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(**given)


@every("images", [{"size": [8, 9]}, {"scale": "0..1"}])
def test_a_size_or_scale_of_no_column_is_refused(images: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="but imageCols names none"):
        ImageColumns((), **images)


def test_a_trained_column_keeps_its_size_and_floats_whatever_its_rows_are_now() -> None:
    trained = spec(size=[8, 9], scale="0..1")
    for column in (PHOTO, STRUCT):
        assert column.as_trained(trained) == trained
    of_one_shape = spec(shape=[3, 8, 9])
    assert PHOTO.as_trained(of_one_shape).encoding == IMAGE
    assert STRUCT.as_trained(of_one_shape).encoding == PIXELS


def model_of_x() -> TorchModel:
    return TorchModel.from_module(nn.Linear(2, 1), torch.zeros(1, 2), featuresCol="x")


def test_what_is_cached_comes_from_the_cache_also_when_its_files_are_gone(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = spark.range(60).select("id", F.array(F.col("id").cast("float"), F.lit(1.0)).alias("x"))
    cached = in_files(made, tmp_path / "parquet").cache()
    rows = cached.count()
    shutil.rmtree(tmp_path / "parquet")
    model = model_of_x()
    try:
        assert len(model.transform(cached.where("id >= 0")).collect()) == rows
    finally:
        cached.unpersist()


@pytest.mark.gate
@pytest.mark.versions
def test_vectors_are_read_from_files(spark: SparkSession, tmp_path: Path) -> None:
    rows: list[Any] = [
        (k, Vectors.sparse(3, {1: float(k)}) if k % 2 else Vectors.dense(k, 0.0, 1.0))
        for k in range(20)
    ]
    frame = in_files(spark.createDataFrame(rows, ["id", "v"]), tmp_path / "vectors")
    module = nn.Linear(3, 1)
    model = TorchModel.from_module(module, torch.zeros(1, 3), featuresCol="v")
    predicted = {row.id: row.prediction for row in model.transform(frame).collect()}
    with torch.no_grad():
        for k, vector in rows:
            expected = module(torch.tensor(vector.toArray(), dtype=torch.float32)).item()
            assert predicted[k] == pytest.approx(expected, abs=1e-5)


VALUES = ["0.1", "123456789012345678.1234567891", "0.0000000001", "-7.25"]


class First(nn.Module):
    """The first number of each row, times one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)[:, 0] * self.one


def values(frame: DataFrame, name: str) -> list[float]:
    return [row[0] for row in frame.select(name).collect()]


@pytest.mark.gate
def test_decimals_are_the_doubles_of_sparks_cast(spark: SparkSession) -> None:
    exact = F.array(*(F.lit(each).cast("decimal(38,10)") for each in VALUES))
    rows = spark.range(1).select(F.explode(exact).alias("x")).coalesce(1)
    rows = rows.select(
        "x", F.array("x", "x").alias("xs"), F.lit(1.5).cast("decimal(4,2)").alias("w")
    )
    rows = rows.withColumn("y", F.col("w") * 2)
    expected = values(rows.withColumn("x", F.col("x").cast("double")), "x")
    fitted = estimator(
        model=First,
        loss=nn.MSELoss(),
        featuresCol="xs",
        labelCol="y",
        weightCol="w",
        numWorkers=1,
        optimizer=partial(torch.optim.SGD, lr=0.0),
    ).fit(rows)
    example = torch.zeros(1, dtype=torch.float64)
    taken = TorchModel.from_module(First(), example, featuresCol="x")
    assert values(fitted.transform(rows), "prediction") == expected
    called = rows.select(taken.udf()("x").alias("prediction"))
    assert values(called, "prediction") == expected
