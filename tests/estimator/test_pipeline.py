"""The estimator is a pyspark.ml stage like any other: pipelines, grids, cross-validation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from every_row import every
from frames import estimator, frame, no_jobs, same_bits
from pyspark.ml import Pipeline, PipelineModel, Transformer
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import (
    CrossValidator,
    CrossValidatorModel,
    ParamGridBuilder,
    TrainValidationSplit,
)
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparkdl import ParameterAveraging, TorchModel, trusted_pickles
from sparkdl.errors import ConfigError

NAMES = ["x0", "x1", "x2", "x3"]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    """Features as columns of their own."""
    return frame(spark).selectExpr(
        "id", "label", *[f"features[{k}] as {name}" for k, name in enumerate(NAMES)]
    )


def assembler() -> VectorAssembler:
    return VectorAssembler(inputCols=NAMES, outputCol="features")


@pytest.mark.versions
def test_a_pipeline_of_assembler_and_estimator_fits_and_predicts(rows: DataFrame) -> None:
    model = Pipeline(stages=[assembler(), estimator()]).fit(rows)
    predicted = model.transform(rows)
    assert predicted.columns == [*rows.columns, "features", "prediction"]
    assert {row.prediction for row in predicted.collect()} <= {0.0, 1.0, 2.0}


def test_params_given_to_fit_win_and_leave_the_estimator_as_it_was(rows: DataFrame) -> None:
    original = estimator()
    model = original.fit(assembler().transform(rows), {original.epochs: 3})
    assert [epoch.epoch for epoch in model.history] == [1, 2, 3]
    assert original.getEpochs() == 1


def test_a_model_takes_over_its_columns_from_the_estimator(rows: DataFrame) -> None:
    given = assembler().transform(rows).withColumnRenamed("features", "inputs")
    model = estimator(featuresCol="inputs", predictionCol="guess", outputType="raw").fit(given)
    assert (model.getFeaturesCol(), model.getPredictionCol()) == ("inputs", "guess")
    assert model.getOutputType() == "raw"


def test_fitting_twice_does_not_continue_from_the_first_fit(rows: DataFrame) -> None:
    again = estimator()
    given = assembler().transform(rows).repartition(2).cache()
    try:
        first = again.fit(given)
        second = again.fit(given)
    finally:
        given.unpersist()
    assert same_bits(first, second)


@pytest.mark.nightly
def test_a_cross_validator_tries_rates_and_strategies_two_at_once_and_is_saved(
    rows: DataFrame, tmp_path: Path
) -> None:
    stage = estimator(numWorkers=1)
    grid = (
        ParamGridBuilder()
        .addGrid(stage.learningRate, [1e-9, 0.5])
        .addGrid(stage.strategy, [{"period": 1}])
        .build()
    )
    validator = CrossValidator(
        estimator=Pipeline(stages=[assembler(), stage]),
        estimatorParamMaps=grid,
        evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
        numFolds=2,
        seed=1,
        parallelism=2,
    )
    best = validator.fit(rows)
    assert len(best.avgMetrics) == 2
    assert all(0 <= accuracy <= 1 for accuracy in best.avgMetrics)
    stages: list[Transformer] = best.bestModel.stages
    assert isinstance(stages[-1], TorchModel)
    assert "period=1" in str(stages[-1].summary.recording.setup.settings["strategy"])
    assert best.transform(rows).count() == 60
    best.save(str(tmp_path / "search"))
    with trusted_pickles():
        again = CrossValidatorModel.load(str(tmp_path / "search"))
    assert again.avgMetrics == best.avgMetrics
    tried = [list(each.values()) for each in again.getEstimatorParamMaps()]
    assert tried == [[1e-9, {"period": 1}], [0.5, {"period": 1}]]
    last = cast(PipelineModel, again.bestModel).stages[-1]
    assert same_bits(cast(TorchModel, last), cast(TorchModel, stages[-1]))


@every(
    ("name", "value", "words"),
    [
        (
            "optimizer",
            partial(torch.optim.SGD, lr=0.1),
            r"has SGD\(lr=0.1\).*learningRate",
        ),
        ("optimizer", torch.optim.Adam, "has Adam for optimizer.*names such as 'Adam'"),
        ("strategy", ParameterAveraging(), r"has ParameterAveraging\(.*\{'period': 10\}"),
        ("model", nn.Linear(4, 3), "has Linear for model.*Leave it out"),
        ("loss", lambda outputs, targets: outputs.mean(), "for loss"),
        ("learningRate", np.float32(0.1), "for learningRate.*ParamGridBuilder converts it"),
    ],
)
def test_a_search_that_could_not_be_saved_is_refused_before_its_first_fit(
    rows: DataFrame, name: str, value: Any, words: str
) -> None:
    stage = estimator(numWorkers=1)
    param = stage.getParam(name)
    grid = [{stage.batchSize: 5}, {param: value}]
    search: Any
    for tried in (stage, Pipeline(stages=[assembler(), stage])):
        for search in (CrossValidator(numFolds=2), TrainValidationSplit()):
            search.setEstimator(tried).setEstimatorParamMaps(grid)
            search.setEvaluator(MulticlassClassificationEvaluator())
            with no_jobs(rows.sparkSession), pytest.raises(ConfigError, match=words):
                search.fit(rows)
        tried.fitMultiple(rows, grid)
        assert tried.copy(grid[1]) is not tried
