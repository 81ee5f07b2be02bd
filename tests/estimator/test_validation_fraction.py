"""A fraction of the rows is held out: the same ones by content and seed, whatever else differs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from frames import estimator, frame, same_bits
from models import append_line, lines, task_rank
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl import GradientAllReduce
from sparkdl.errors import ConfigError, DataError
from sparkdl.spark.rows.columns import held_out_fraction, input_column

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Sides(nn.Module):
    """Records in evaluation mode which ids it sees, and in training mode too."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.layer = nn.Linear(4, 3)

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        if task_rank() >= 0:
            side = "train" if self.training else "held"
            append_line(self.path, " ".join(map(str, [side, *ids.tolist()])))
        return self.layer(features)


def sides(trace: Path, rows: DataFrame, **changes: Any) -> tuple[set[int], set[int], Any]:
    """The ids that one fit has trained on and those that it has validated with."""
    trace.unlink(missing_ok=True)
    settings = {"model": Sides(str(trace)), "featuresCols": ["features", "id"], **changes}
    fitted = estimator(validationFraction=0.25, **settings).fit(rows)
    seen: dict[str, set[int]] = {"train": set(), "held": set()}
    for line in lines(trace):
        side, *ids = line.split()
        seen[side] |= set(map(int, ids))
    return seen["train"], seen["held"], fitted


def chosen(rows: DataFrame, names: list[str], fraction: float, seed: int = 0) -> list[int]:
    columns = tuple(input_column(rows, name, "featuresCols") for name in names)
    held = rows.where(held_out_fraction(columns, fraction, seed).expression())
    return sorted(row.id for row in held.select("id").collect())


def test_every_row_is_on_one_side_and_the_same_for_any_workers_partitions_and_strategy(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows, trace = frame(spark, rows=120), tmp_path / "trace"
    trained, held, fitted = sides(trace, rows, epochs=2)
    assert trained | held == set(range(120))
    assert not trained & held
    assert [epoch.validation_examples for epoch in fitted.history] == [len(held)] * 2
    assert [epoch.examples for epoch in fitted.history] == [len(trained)] * 2
    assert sorted(held) == chosen(rows, ["features", "id", "label"], 0.25, seed=7)
    other = rows.repartition(5).orderBy(F.desc("id"))
    strategy = GradientAllReduce()
    again = sides(trace, other, strategy=strategy, numWorkers=3, shuffleRows="spark")
    assert again[:2] == (trained, held)


def test_a_resumed_fit_holds_the_same_rows_out_and_another_seed_others(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows, path = frame(spark), str(tmp_path / "checkpoints")
    settings: dict[str, Any] = {"validationFraction": 0.3, "checkpointPath": path}
    estimator(epochs=1, **settings).fit(rows)
    resumed = estimator(epochs=2, **settings).fit(rows)
    assert same_bits(resumed, estimator(epochs=2, validationFraction=0.3).fit(rows))
    told = r"validation indicator: was validationFraction=0\.3 \(bool\), is now validationFraction="
    with pytest.raises(ConfigError, match=told):
        estimator(epochs=3, **{**settings, "validationFraction": 0.4}).fit(rows)
    names = ["features", "label"]
    assert chosen(rows, names, 0.3, seed=1) != chosen(rows, names, 0.3, seed=2)


def test_the_fraction_is_the_wanted_one_and_a_larger_one_only_adds_rows(
    spark: SparkSession,
) -> None:
    rows, before = spark.range(20_000), set[int]()
    for fraction in (0.001, 0.1, 0.5, 0.999):
        held = chosen(rows, ["id"], fraction)
        deviation = (20_000 * fraction * (1 - fraction)) ** 0.5
        assert abs(len(held) - 20_000 * fraction) < 5 * deviation
        assert before <= set(held)
        before = set(held)


def test_rows_of_every_type_can_be_told_apart(spark: SparkSession) -> None:
    rows = spark.createDataFrame(
        [(i, Vectors.dense([i, 1]), bytes([i]), [[float(i)]], i > 3) for i in range(100)],
        ["id", "vector", "binary", "nested", "flag"],
    )
    for name in ("vector", "binary", "nested"):
        assert 25 < len(chosen(rows, [name], 0.5)) < 75
    assert len(chosen(rows, ["flag"], 0.5)) in (0, 4, 96, 100)


def test_equal_rows_are_on_one_side_which_is_said(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    rows = frame(spark, rows=8).crossJoin(spark.range(50).select(F.lit(1).alias("one")))
    fitted = estimator(validationFraction=0.4).fit(rows)
    assert (fitted.history[0].validation_examples or 0) % 50 == 0
    assert "rows with the same content are on the same side" in caplog.text


def test_what_makes_no_sense_is_refused(spark: SparkSession) -> None:
    rows = frame(spark).withColumn("held", F.col("id") % 2 == 0)
    both = "validationFraction=0.2 and validationIndicatorCol='held' both say which rows"
    with pytest.raises(ConfigError, match=both):
        estimator(validationFraction=0.2, validationIndicatorCol="held").fit(rows)
    with pytest.raises(DataError, match=r"validationFraction=1e-09 holds out none of 60 rows"):
        estimator(validationFraction=1e-9).fit(rows)
