"""Columns and models that a fit refuses before it trains."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from every_row import every, every_row
from frames import Refuse, estimator, frame, no_jobs
from models import Net, TwoTables
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from sparkdl.errors import DataError, ModelError
from sparkdl.estimator.checks.preflight import plan_fit
from sparkdl.estimator.checks.row_checks import RowChecks
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.shards import DataStatistics
from sparkdl.strategies import GradientAllReduce


def null_where(name: str, condition: str) -> str:
    return f"if({condition}, null, {name})"


HOLED = "transform(features, x -> if(id % 15 = 2, null, x))"
BINARY = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
RANGE = "3 outputs", "0 to 2", "StringIndexer"
THREE = {"numWorkers": 3}
Case = tuple[str, str | Callable[[], Column], Sequence[str], dict[str, Any]]
TYPES: list[Case] = [
    ("features", "'a'", ["string", "StringIndexer"], {}),
    ("features", "timestamp_seconds(id)", ["timestamp", "unix_timestamp"], {}),
    ("features", "date_from_unix_date(cast(id as int))", ["date", "dayofyear"], {}),
    ("features", "map('a', id)", ["map<string,bigint>", "columns of their own"], {}),
    ("features", "struct(id)", ["struct<id:bigint>", "columns of their own"], {}),
    ("features", "array('a')", ["array<string>", "array of numbers"], {}),
    ("label", "string(label)", ["labelCol", "string", "StringIndexer"], {}),
    ("my.own col", "'text'", ["string"], {"featuresCol": "my.own col"}),
]
NULLS: list[Case] = [
    *(
        (
            name,
            null_where(name, "id % 20 = 1"),
            ["3 null values in 60", f"`{name}` IS NOT NULL"],
            {},
        )
        for name in ("features", "label")
    ),
    (
        "features",
        lambda: F.when(F.col("id") >= 2, array_to_vector("features")),
        ["2 null values in 60 rows"],
        {},
    ),
    ("features", HOLED, ["null elements", "4 of 60 rows"], {}),
]
LENGTHS: list[Case] = [
    (
        "features",
        "if(id = 33, slice(features, 1, 2), features)",
        ["arrays of 2 to 4 elements", "same number"],
        {},
    ),
    (
        "features",
        lambda: array_to_vector(F.expr("if(id = 33, concat(features, array(1.0D)), features)")),
        ["4 to 5 elements"],
        {},
    ),
    ("features", "slice(features, 1, 0)", ["empty arrays"], {}),
    # No worker sees two lengths.
    ("features", "slice(features, 1, int(4 - id div 20))", ["arrays of 2 to 4 elements"], THREE),
]
LABELS: list[Case] = [
    ("label", "double(label - 1)", ["-1 to 1", *RANGE], {}),
    ("label", "if(id = 59, 7, label)", ["0 to 7", "row 19 of partition 2", "0 to 2"], THREE),
    (
        "label",
        "label + if(id < 5, 0.25D, 0D)",
        ["double", "not whole in 5 rows, the first", "CrossEntropyLoss"],
        {},
    ),
    ("label", "if(id = 17, double('NaN'), double(label))", ["NaN"], {}),
]


FOUND = (NULLS, LENGTHS, LABELS)
"""By workers, so that each is a job."""


def with_column(spark: SparkSession, name: str, column: str | Callable[[], Column]) -> DataFrame:
    return frame(spark).withColumn(name, F.expr(column) if isinstance(column, str) else column())


@every_row(*TYPES)
def test_a_type_that_cannot_be_trained_on_is_named_before_any_job(
    spark: SparkSession, name: str, column: str, fragments: Sequence[str], changes: dict[str, Any]
) -> None:
    rows = with_column(spark, name, column)
    with no_jobs(spark), pytest.raises(DataError, match=re.escape(f"'{name}'")) as caught:
        plan_fit(estimator(**changes), rows)
    assert [each for each in fragments if each not in str(caught.value)] == []


@pytest.mark.parametrize(
    "cases",
    [
        [kind[0] for kind in FOUND],
        pytest.param([each for kind in FOUND for each in kind[1:]], marks=pytest.mark.nightly),
    ],
    ids=["one of each kind", "others"],
)
def test_a_column_that_cannot_be_trained_on_is_named_with_why_and_the_way_out(
    spark: SparkSession, refuse: Refuse, cases: list[Case]
) -> None:
    for name, column, fragments, changes in cases:
        refuse(with_column(spark, name, column), DataError, f"'{name}'", *fragments, **changes)


def test_a_column_that_is_missing_or_there_twice_is_named(
    spark: SparkSession, refuse: Refuse
) -> None:
    rows = frame(spark)
    for param in ("featuresCol", "labelCol"):
        refuse(rows, DataError, param, "'nowhere'", "id, features, label", **{param: "nowhere"})
    several = {"featuresCols": ["features", "nowhere"]}
    refuse(rows, DataError, "featuresCols", "'nowhere'", **several)
    for name in ("features", "label"):
        right = frame(spark).select(F.col("id").alias("other"), name)
        doubled = rows.join(right, rows.id == right.other)
        refuse(doubled, DataError, f"'{name}'", "2 times", "rename")


def test_a_column_that_spark_does_not_tell_from_another_is_refused_unless_it_is_told_to(
    spark: SparkSession, refuse: Refuse
) -> None:
    doubled = frame(spark).withColumnsRenamed({"id": "Label"})
    refuse(doubled, DataError, "labelCol", "'Label', 'label'", "spark.sql.caseSensitive", "rename")
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert estimator(**THREE).fit(doubled).module
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_frame_of_fewer_rows_than_workers_is_refused_shuffled_or_not(
    spark: SparkSession, refuse: Refuse
) -> None:
    """Spark knows the last to be empty before it runs anything."""
    for where in ("rand(1) > 2", "false"):
        refuse(frame(spark).where(where), DataError, "DataFrame is empty", **THREE)
    refuse(frame(spark, rows=2), DataError, "2 rows", "3 workers", "numWorkers", **THREE)


def test_a_bad_row_is_named_by_the_partition_that_spark_has_read(
    spark: SparkSession, refuse: Refuse
) -> None:
    """Each worker reads several, one behind the other."""
    rows = frame(spark, rows=64, partitions=16).where("id != 41")
    rows = rows.withColumn("label", F.expr("if(id in (43, 63), 7, label)"))
    refuse(rows, DataError, "'label'", "0 to 7", "of partition 1", numWorkers=3)
    nulls = rows.withColumn("features", F.expr("if(id = 43, null, features)"))
    refuse(nulls, DataError, "'features'", "(the first is row 2 of partition 10)", numWorkers=3)


def test_a_stream_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    rows = spark.readStream.format("rate").load()
    refuse(rows, DataError, "is a stream", "foreachBatch")


@every_row(
    ("features", "float16", 1e5, "float16, -65504 to 65504"),
    ("label", "float32", 1e39, "float32"),
)
def test_numbers_out_of_the_dtypes_range_are_named_with_their_place(
    spark: SparkSession, refuse: Refuse, column: str, dtype: str, value: float, names: str
) -> None:
    bad = F.lit(value) if column == "label" else F.array(*[F.lit(value)] * 4)
    rows = frame(spark, rows=60, partitions=2).withColumn("label", F.col("label").cast("double"))
    rows = rows.withColumn(column, F.when(F.col("id").isin(33, 47), bad).otherwise(F.col(column)))
    changes = {"columnDtypes": {column: dtype}, "loss": nn.MSELoss()}
    place = "(the first is row 3 of partition 1)"
    refuse(rows, DataError, f"'{column}'", "2 rows of 60", names, place, **changes)


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    """Some that have every column of the cases."""
    return frame(spark).select(
        "*",
        (F.col("id") % 6).alias("carrier"),
        (F.col("id") % 5 - 1).alias("negative"),
        F.col("label").cast("double").alias("double"),
    )


STATISTICS = {
    "features": ColumnStatistics(shortest=4, longest=4),
    "carrier": ColumnStatistics(smallest=0, largest=5),
    "negative": ColumnStatistics(smallest=-1, largest=3, places={"smallest": (0, 0)}),
    "label": ColumnStatistics(smallest=0, largest=2),
    "double": ColumnStatistics(smallest=0, largest=2),
}


def checked(
    rows: DataFrame, shards: tuple[int, ...] = (30, 30), found: Any = STATISTICS, **changes: Any
) -> None:
    """Check as a fit does before its workers start, and once each has found its rows."""
    tuned = estimator(**changes)
    names = [*changes.get("featuresCols", ["features"]), changes.get("labelCol", "label")]
    plan, replica = plan_fit(tuned, rows)
    statistics = DataStatistics(shards, tuple(found[name] for name in names))
    RowChecks(replica).check(plan, statistics)


def refuse_before_training(
    rows: DataFrame, error: type[Exception], fragments: Sequence[str], **changes: Any
) -> None:
    with pytest.raises(error) as caught:
        checked(rows, **changes)
    assert [each for each in fragments if each not in str(caught.value)] == []


def no_such_layer() -> nn.Module:
    raise LookupError("no such layer")


class Pair(nn.Linear):
    def forward(self, features: Tensor) -> Any:
        return super().forward(features), features


class Mean(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features).mean(dim=0)


class HoldsALock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].guard = threading.Lock()


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.LazyLinear(4)


TABLES = TwoTables(entries=5)
UNTRAINED = "no parameter that requires a gradient"
MODELS: list[tuple[Any, dict[str, Any], list[str]]] = [
    (
        nn.Linear(5, 3),
        {},
        ["the model fails on a batch with features of float32 (2, 4)", "(2x4 and 5"],
    ),
    (TwoTables(), {}, ["float32 (2, 4)", "features"]),
    (TABLES, {"featuresCols": ["negative", "features"]}, ["'negative' from -1 (row", "out of r"]),
    (no_such_layer, {}, ["cannot be built", "LookupError", "no such layer"]),
    (lambda: "a model", {}, ["nn.Module"]),
    (nn.Linear(4, 3).requires_grad_(False), {}, [UNTRAINED]),
    (nn.Identity(), {}, [UNTRAINED]),
    (lambda: Pair(4, 3), {}, ["a tuple of 0 float32 (2, 3)"]),
    (lambda: Mean(4, 3), {}, ["returns shape (3,)", "must be the rows"]),
    (HoldsALock(), {}, ["model cannot be sent", "model.layers.1.guard", "lock"]),
    (Unused, {}, ["lazy layers", "calls it on a batch of zeros"]),
    # Two rows of two outputs would broadcast against two targets, with no more than a warning.
    (nn.Linear(4, 2), {"loss": nn.MSELoss()}, ["outputs float32 (2, 2) and targets float32 (2,)"]),
    (nn.Linear(4, 3), {"loss": nn.MSELoss()}, ["outputs float32 (2, 3) and targets float32 (2,)"]),
    # The labels go up to 2; it is not they that are wrong.
    (
        nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))),
        {"loss": nn.CrossEntropyLoss()},
        ["The model returns shape (2, 3) for each row", "(rows, classes)"],
    ),
]


@every_row(*MODELS)
def test_a_model_that_cannot_work_is_refused_with_why(
    rows: DataFrame, model: Any, changes: dict[str, Any], fragments: list[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refuse_before_training(rows, ModelError, fragments, model=model, **changes)


def test_a_label_that_the_loss_ignores_is_not_out_of_range(rows: DataFrame) -> None:
    found = STATISTICS | {"label": ColumnStatistics(smallest=-1, largest=2)}
    checked(rows, found=found, loss=nn.CrossEntropyLoss(ignore_index=-1))
    with pytest.raises(DataError, match="-1 to 2"):
        checked(rows, found=found)


@every("loss", [nn.BCEWithLogitsLoss(), nn.BCELoss()])
def test_a_label_that_is_neither_of_two_classes_is_refused(rows: DataFrame, loss: Any) -> None:
    refuse_before_training(
        rows, DataError, ["'label'", "0 to 2", "0 to 1"], loss=loss, model=BINARY
    )


def test_an_index_that_the_model_lacks_is_named_with_its_rows_before_anybody_trains(
    rows: DataFrame, refuse: Refuse
) -> None:
    range_and_places = "'carrier' from 0 (row 0 of partition 0) to 5 (row 5 of partition 0)"
    words = "features of int64 (2,), float32 (2, 4)", range_and_places, "index out of range"
    columns = ["carrier", "features"]
    refuse(rows, ModelError, *words, model=TABLES, featuresCols=columns, numWorkers=3)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.nll_loss(outputs.log_softmax(dim=1), targets)


def detached(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.detach().mean()


def of_all_pairs(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    values = (outputs.reshape(-1, 1) - targets.reshape(1, -1)) ** 2
    return values.mean() if reduction == "mean" else values


def guarded() -> Any:
    guard = threading.Lock()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with guard:
            return nn.functional.cross_entropy(outputs, targets)

    return loss


ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=5)
OTHERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"loss": nn.CrossEntropyLoss(reduction="none")}, ["must be a scalar tensor", "(2,)"]),
    ({"loss": lambda o, t: 1.0}, ["scalar tensor", "float"]),
    (
        {"loss": own_loss, "labelCol": "double"},
        ["the loss fails on outputs float32 (2, 3) and targets float32 (2,)", "'double'", "Long"],
    ),
    ({"loss": detached}, ["backward pass", "does not require grad"]),
    (
        {"model": nn.Linear(4, 1), "loss": of_all_pairs, "lossCol": "error"},
        ["lossCol need a loss with one value per row, but for 11 rows it gives (11, 11)"],
    ),
    ({"loss": guarded()}, ["loss cannot be sent", "'guard'", "lock"]),
    ({"optimizer": torch.optim.LBFGS}, ["optimizer", "closure"]),
    ({"optimizer": partial(torch.optim.SGD, lr=-1.0)}, ["Invalid learning rate: -1.0"]),
    (
        {"optimizer": partial(torch.optim.SGD, lr=0.1, hook=threading.Lock())},
        ["optimizer cannot be sent", "optimizer.keywords['hook']"],
    ),
    ({"scheduler": partial(lr_scheduler.StepLR, step=3)}, ["scheduler cannot be built: TypeError"]),
    (
        {"scheduler": lr_scheduler.ReduceLROnPlateau, "schedulerEvery": "step"},
        ["schedulerEvery='epoch'"],
    ),
    (
        {"scheduler": ONE_CYCLE, "schedulerEvery": "step", "epochs": 2},
        ["OneCycleLR ends after total_steps=5, but this training takes 6 of its steps"],
    ),
]


@every_row(*OTHERS)
def test_a_loss_an_optimizer_or_a_schedule_that_cannot_work_is_refused_with_why(
    rows: DataFrame, changes: dict[str, Any], fragments: list[str]
) -> None:
    refuse_before_training(rows, ModelError, fragments, **changes)


def test_a_model_that_cannot_train_on_the_one_row_that_is_left_is_refused(
    rows: DataFrame,
) -> None:
    """Two workers have 31 rows each, and minibatches of 10; together two are left, or one of 61."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    together = {"model": model, "strategy": GradientAllReduce(sync_batch_norm=True)}
    told = r"of one row, which a worker with 31 rows has.*dropLast"
    with pytest.raises(ModelError, match=told):
        checked(rows, (31, 31), model=model)
    checked(rows, (31, 31), model=model, dropLast=True)
    checked(rows, (31, 31), **together)
    with pytest.raises(ModelError, match=told):
        checked(rows, (31, 30), **together)
