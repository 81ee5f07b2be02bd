"""Rows reach Python in a form that Spark can pass on, whatever its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every_row import every
from frames import CLASSES, configured, estimator, frame, in_files, same_bits
from pyspark.sql import SparkSession
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from sparkdl import TorchModel
from sparkdl.errors import ConfigError

RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


def test_without_a_limit_of_rows_predictions_end(spark: SparkSession, tmp_path: Path) -> None:
    """Spark 4.3.0 passes columnar rows to Python in batches of 0 rows, for ever."""
    made = spark.range(0, 90, 1, 2).selectExpr("array(cast(id as float)) features")
    rows = in_files(made, tmp_path / "table").selectExpr("features as features")
    model = TorchModel.from_module(nn.Linear(1, 1), torch.zeros(1, 1))
    for limit in ("0", "-1"):
        with configured(spark, {RECORDS: limit}):
            added = model.transform(rows)
            plan = added._jdf.queryExecution().executedPlan().toString()
            assert "Filter" in plan.split("ArrowEvalPython")[1]  # which passes on rows only
            with pytest.raises(ConfigError, match=f"{RECORDS} is {limit}.*{COLUMNAR}"):
                model.udf()
            assert len(added.select("prediction").collect()) == 90
    with configured(spark, {RECORDS: "-1", COLUMNAR: "false"}):
        assert rows.select(model.udf()("features")).count() == 90


@pytest.mark.slow
@every("kept", ["in files", "in memory"])
def test_without_a_limit_of_rows_fits_and_evaluations_are_the_same(
    spark: SparkSession, tmp_path: Path, kept: str
) -> None:
    """Both are columnar; Spark passes them on to functions of whole partitions."""
    made = frame(spark, rows=90, partitions=2)
    rows = in_files(made, tmp_path / "table") if kept == "in files" else made.cache()
    wanted = estimator(shuffleRows="none").fit(rows)
    accuracy = {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}
    measured = wanted.evaluate(rows, accuracy)
    with configured(spark, {RECORDS: "0"}):
        assert same_bits(estimator(shuffleRows="none").fit(rows), wanted)
        assert wanted.evaluate(rows, accuracy) == measured
    made.unpersist()
