"""Rows that workers read from files, and those that Spark delivers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frames import configured, estimator, in_files
from missing_names import lacking
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl import TorchModel
from sparkdl.errors import ConfigError
from sparkdl.spark.rows.delivery import SHUFFLES, Way, delivery_of
from sparkdl.spark.rows.in_files import columns_in_files

COLUMNS = {
    "id": "id",
    "group": "id % 2",
    "x": "array(cast(id as float), cast(id % 7 as float))",
    "nested": "array(array(id, -id))",
    "raw": "unhex(lpad(hex(id), 4, '0'))",
    "words": "array(cast(id as string))",
}
Change = Callable[[DataFrame], DataFrame]


@pytest.fixture(scope="module")
def files(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    path = (tmp_path_factory.mktemp("in files") / "a%20 table").as_uri()
    rows = spark.range(0, 60, 1, 3).selectExpr(
        *[f"{sql} as {name}" for name, sql in COLUMNS.items()]
    )
    rows.write.partitionBy("group").parquet(path)
    return spark.read.parquet(path)


def model_of_x() -> TorchModel:
    return TorchModel.from_module(nn.Linear(2, 1), torch.zeros(1, 2), featuresCol="x")


def found(frame: DataFrame) -> set[str]:
    return set(columns_in_files(frame, {name: name for name in frame.columns}))


PLANS: dict[str, tuple[Change, set[str]]] = {
    "read": (lambda df: df, {"x", "nested", "raw"}),
    "filtered": (lambda df: df.where("id > 10 and x[0] < 40"), {"x", "nested", "raw"}),
    "selected": (lambda df: df.select("id", "x").alias("t"), {"x"}),
    "renamed": (lambda df: df.withColumnRenamed("x", "y"), {"nested", "raw"}),
    "computed": (lambda df: df.withColumn("x", F.expr("x")), {"nested", "raw"}),
    "coalesced": (lambda df: df.coalesce(1).where("id > 10"), {"x", "nested", "raw"}),
    "sorted": (lambda df: df.orderBy("id"), set()),
    "shuffled": (lambda df: df.repartition(2), set()),
    "coalesced after a shuffle": (lambda df: df.repartition(2).coalesce(1), set()),
    "united": (lambda df: df.union(df), set()),
    "limited": (lambda df: df.limit(3), set()),
    "joined": (lambda df: df.join(df.select("id"), "id"), set()),
    "made": (lambda df: df.sparkSession.range(3).select(F.array("id").alias("x")), set()),
}


def test_only_what_is_read_row_by_row_is_in_files(files: DataFrame) -> None:
    read = {name: found(change(files)) for name, (change, _) in PLANS.items()}
    assert read == {name: expected for name, (_, expected) in PLANS.items()}


def test_what_spark_reads_otherwise_is_not_read_from_files(
    spark: SparkSession, files: DataFrame, tmp_path: Path
) -> None:
    assert found(in_files(files, tmp_path / "parquet"))
    path = (tmp_path / "parquet").as_uri()
    assert not found(spark.read.option("ignoreCorruptFiles", "true").parquet(path))
    assert not found(spark.readStream.schema(spark.read.parquet(path).schema).parquet(path))
    spark.read.parquet(path).write.orc((tmp_path / "orc").as_uri())
    assert not found(spark.read.orc((tmp_path / "orc").as_uri()))
    with configured(spark, {"spark.sql.files.ignoreMissingFiles": "true"}):
        assert not found(spark.read.parquet(path))


def test_what_is_cached_comes_from_the_cache_also_when_its_files_are_gone(
    files: DataFrame, tmp_path: Path
) -> None:
    cached = in_files(files.select("id", "x"), tmp_path / "parquet").cache()
    rows = cached.count()
    shutil.rmtree(tmp_path / "parquet")
    model = model_of_x()
    try:
        assert not found(cached) | found(cached.where("id >= 0"))
        assert len(model.transform(cached.where("id >= 0")).collect()) == rows
    finally:
        cached.unpersist()


def test_who_cannot_be_asked_where_its_rows_lie_is_read_by_spark(
    spark: SparkSession, files: DataFrame, tmp_path: Path
) -> None:
    files.createOrReplaceTempView("of_files")
    named = in_files(
        files.select("id", "x").withColumnRenamed("id", "_metadata"), tmp_path / "named"
    )
    model = model_of_x()
    for frame in (spark.table("of_files"), named):
        assert not found(frame)
        assert model.transform(frame).select("prediction").count() == 60


def by_spark(frame: DataFrame, column: str) -> DataFrame:
    """The same rows, of which Spark reads a column."""
    return frame.withColumn(column, F.expr(column))


@pytest.mark.versions
def test_predictions_are_those_of_the_rows_that_spark_reads(files: DataFrame) -> None:
    """Also where Spark lacks the private names by which it says which files it reads."""
    model = model_of_x()

    def predicted(frame: DataFrame) -> dict[int, float]:
        rows = model.transform(frame).select("id", "prediction").collect()
        return {row.id: row.prediction for row in rows}

    frames = {
        "read": files,
        "filtered": files.where("id % 3 = 1"),
        "none": files.where("id < 0"),
        "coalesced": files.coalesce(2).where("id % 3 = 1"),
    }
    found_by = {name: predicted(frame) for name, frame in frames.items()}
    assert found_by == {name: predicted(by_spark(each, "x")) for name, each in frames.items()}
    assert list(map(len, found_by.values())) == [60, 20, 0, 20]
    with lacking("analyzed"):
        assert found(files) == set()
        assert predicted(files) == found_by["read"]


@pytest.mark.versions
def test_training_on_files_gives_the_bits_of_the_rows_that_spark_reads(files: DataFrame) -> None:
    linear = estimator(
        model=partial(nn.Linear, 2, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=1e-4),
        featuresCol="x",
        labelCol="id",
        epochs=2,
        validationFraction=0.3,
        batchSize=8,
    )
    assert found(files.select("id", "x")) == {"x"}
    ours, others = (linear.fit(each) for each in (files, by_spark(files, "x")))
    assert torch.equal(ours.module.weight, others.module.weight)
    assert ours.history[0].validation_loss == others.history[0].validation_loss
    assert 0 < ours.history[0].examples < 60


@pytest.mark.slow
def test_vectors_are_read_from_files(spark: SparkSession, tmp_path: Path) -> None:
    rows: list[Any] = [
        (k, Vectors.sparse(3, {1: float(k)}) if k % 2 else Vectors.dense(k, 0.0, 1.0))
        for k in range(20)
    ]
    frame = in_files(spark.createDataFrame(rows, ["id", "v"]), tmp_path / "vectors")
    assert found(frame) == {"v"}
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
