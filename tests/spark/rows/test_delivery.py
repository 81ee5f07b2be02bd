"""How rows get to tasks, and that they are Spark's rows whatever they lie in."""

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
from sparkdl.errors import ConfigError
from sparkdl.spark.rows.delivery import SHUFFLES, Way, delivery_of


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


AS_IT_IS, GROUPED, MOVED, SHUFFLED = Way


def test_rows_go_this_way_to_two_tasks() -> None:
    cases: list[tuple[str, int | None, str | None, Way, bool]] = [
        ("exchange", 2, None, AS_IT_IS, True),
        ("exchange", 5, None, GROUPED, True),
        ("exchange", 1, None, GROUPED, True),
        ("exchange", None, None, GROUPED, True),
        ("exchange", 2, "X", AS_IT_IS, True),
        ("exchange", 5, "X", MOVED, True),
        ("exchange", None, "X", MOVED, True),
        ("spark", 2, None, AS_IT_IS, False),
        ("spark", 5, None, SHUFFLED, False),
        ("spark", None, "X", SHUFFLED, False),
        ("none", 2, "X", AS_IT_IS, False),
        ("none", 5, None, GROUPED, False),
        ("none", None, "X", GROUPED, False),
    ]
    wrong = []
    for wish, partitions, gang_start_for, way, exchanged in cases:
        found = delivery_of(partitions, 2, 1, wish, gang_start_for)
        if (found.way, found.exchanged) != (way, exchanged) or bool(found.reason) != (
            way in (MOVED, SHUFFLED)
        ):
            wrong.append((wish, partitions, gang_start_for, found))
    assert wrong == []


def test_a_single_worker_exchanges_with_nobody() -> None:
    assert not delivery_of(5, 1, 1, "exchange", None).exchanged
    assert delivery_of(5, 1, 2, "exchange", None).exchanged  # the task is two workers


def test_only_rows_that_are_to_stay_cannot_be_shuffled_after_all() -> None:
    assert SHUFFLES == ("exchange", "spark", "none")
    for wish in ("exchange", "spark"):
        delivery = delivery_of(2, 2, 1, wish, None)
        moved = delivery.shuffled("because")
        assert (moved.way, moved.exchanged) == (MOVED, delivery.exchanged)
        shuffled = moved.shuffled("because")
        assert (shuffled.way, shuffled.exchanged) == (SHUFFLED, delivery.exchanged)
    with pytest.raises(ConfigError, match="cannot be read as they are: because"):
        delivery_of(2, 2, 1, "none", None).shuffled("because")


def test_rows_that_are_to_stay_in_partitions_that_barrier_mode_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 5 for 2 tasks .* df\.repartition\(2\)"):
        delivery_of(5, 2, 1, "none", "X")
