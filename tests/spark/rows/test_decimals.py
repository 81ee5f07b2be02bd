"""Decimals feed a model as the doubles that Spark casts them to."""

from __future__ import annotations

from functools import partial

import torch
from frames import estimator
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

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
