"""The rows are Spark's, whatever they lie in."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frames import estimator, in_files
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl import TorchModel


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


def test_decimals_are_the_doubles_of_sparks_cast(spark: SparkSession) -> None:
    exact = F.array(*(F.lit(each).cast("decimal(38,10)") for each in VALUES))
    rows = spark.range(1).select(F.explode(exact).alias("x")).coalesce(1)
    rows = rows.select(
        "x", F.array("x", "x").alias("xs"), F.lit(1.5).cast("decimal(4,2)").alias("w")
    )
    rows = rows.withColumn("y", F.col("w") * 2)
    expected = values(rows.withColumn("x", F.col("x").cast("double")), "x")
    for name in ("x", "xs"):
        model = estimator(
            model=First,
            loss=nn.MSELoss(),
            featuresCol=name,
            labelCol="y",
            weightCol="w",
            numWorkers=1,
            optimizer=partial(torch.optim.SGD, lr=0.0),
        ).fit(rows)
        assert values(model.transform(rows), "prediction") == expected
        called = rows.select(model.udf()(name).alias("prediction"))
        assert values(called, "prediction") == expected
