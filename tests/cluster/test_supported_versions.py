"""What has to work with every supported version of Spark, beside tests of other files so marked.

``make test-versions`` runs all that are marked ``versions``, once with each version.
"""

from __future__ import annotations

import copy
import sys

import cloudpickle
import numpy as np
import pyspark
import pytest
import torch
from frames import configured, descended, estimator, frame, labels_of
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

from sparkdl import (
    AsynchronousSGD,
    GossipAveraging,
    ParameterAveraging,
    ThresholdGradientSharing,
    TorchModel,
)
from sparkdl.strategies import SSP, Strategy

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.versions]
LARGE = (1 << 60) + 1
"""No float64."""

FAMILIES: dict[str, Strategy] = {
    "by host": ParameterAveraging(1, aggregation="hierarchical"),
    "asynchronous": AsynchronousSGD(1, barrier=SSP(2)),
    "threshold": ThresholdGradientSharing(0),
    "gossip": GossipAveraging(),
}


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_of_strategies_takes_the_steps_of_one_process(
    spark: SparkSession, family: str
) -> None:
    """In an epoch each worker has one minibatch, which together are all rows."""
    given = estimator(strategy=FAMILIES[family], numWorkers=3, batchSize=30, epochs=3)
    oracle = copy.deepcopy(given.getOrDefault(given.model))
    model = given.fit(frame(spark, 90, 3))
    assert [epoch.examples for epoch in model.history] == [90] * 3
    descended(oracle, labels_of(range(90)), lr=0.1, steps=3)
    for mine, other in zip(model.module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


class Sum(nn.Module):
    """The sum of a row's numbers, of integers their last three digits, in the place of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, *inputs: Tensor) -> Tensor:
        numbers = [each if each.is_floating_point() else each % 1000 for each in inputs]
        columns = [each.unsqueeze(1) if each.dim() == 1 else each for each in numbers]
        total: Tensor = self.scale * torch.cat([each.double() for each in columns], 1).sum(1)
        return total


def sums_of(predicted: DataFrame) -> list[float | None]:
    return [row.prediction for row in predicted.orderBy("id").collect()]


def mixed(spark: SparkSession) -> DataFrame:
    """Null, NaN and large integers, in single columns and in arrays."""
    rows = [
        (0, 1.5, 1, [1.0, 2.0]),
        (1, float("nan"), 2, [1.0, 2.0]),
        (2, 1.0, 3, [float("nan"), 2.0]),
        (3, 1.0, LARGE, [0.0, 0.0]),
        (4, None, 4, [1.0, 2.0]),
        (5, 1.0, None, [1.0, 2.0]),
        (6, 1.0, 5, None),
        (7, 1.0, 5, [1.0, None]),
    ]
    return spark.createDataFrame(rows, "id long, x double, n long, v array<double>").coalesce(1)


def summing(**settings: object) -> TorchModel:
    numbers = torch.zeros(1, dtype=torch.float64)
    example = (numbers, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.float64))
    return TorchModel.from_module(Sum().double(), example, featuresCols=["x", "n", "v"], **settings)


def test_nulls_nan_and_large_integers_are_told_apart_in_transform(spark: SparkSession) -> None:
    rows = mixed(spark)
    whole = sums_of(summing().transform(rows.where("id < 4")))
    assert whole[0] == 5.5
    assert np.isnan(whole[1:3]).all()
    assert whole[3] == 1.0 + LARGE % 1000
    skipped = sums_of(summing(handleInvalid="skip").transform(rows))
    assert [skipped[0], skipped[3]] == [5.5, 1.0 + LARGE % 1000]
    assert skipped[4:] == [None] * 4


@pytest.mark.gate
def test_a_function_for_sql_predicts_what_the_model_does(spark: SparkSession) -> None:
    rows = mixed(spark).where("id in (0, 3)")
    spark.udf.register("total", summing().udf())
    rows.createOrReplaceTempView("mixed")
    for records in ("1", "10000"):
        with configured(spark, {"spark.sql.execution.arrow.maxRecordsPerBatch": records}):
            found = spark.sql("SELECT id, total(x, n, v) AS prediction FROM mixed")
            assert sums_of(found) == [5.5, 1.0 + LARGE % 1000]


@pytest.mark.gate
def test_nan_reaches_a_function_for_sql_or_is_refused_by_the_name_of_the_version(
    spark: SparkSession,
) -> None:
    function = summing().udf()
    found = mixed(spark).where("id = 1").select("id", function("x", "n", "v").alias("prediction"))
    if tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 1):
        assert np.isnan(sums_of(found)[0])
    else:
        with pytest.raises(Exception, match=f"NULL or NaN, which Spark {pyspark.__version__}"):
            found.collect()
