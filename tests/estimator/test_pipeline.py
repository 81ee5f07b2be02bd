"""Pipelines and searches, and stages that nobody trusts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from auditing import deeds
from every_row import every, every_row
from frames import estimator, frame, no_jobs, same_bits
from hostile import (
    DESCRIPTION,
    FILES,
    LINEAR,
    METADATA,
    OBJECTS,
    RELU,
    SEQUENTIAL,
    SMALL,
    Json,
    bound,
    damaged,
    made,
    named,
    only_the_projects_errors,
    saved_estimator,
    saved_model,
    specs,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
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
from safetensors.torch import save_file
from torch import nn

from sparkdl import ParameterAveraging, TorchEstimator, TorchModel, load_module, trusted_pickles
from sparkdl.checkpoint.module_files import read_module
from sparkdl.checkpoint.object_spec import load_object
from sparkdl.checkpoint.trust import Trust
from sparkdl.errors import ConfigError
from sparkdl.estimator.persistence import EXPECTED

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


def test_params_given_to_fit_win_and_the_model_takes_over_its_columns(rows: DataFrame) -> None:
    given = assembler().transform(rows).withColumnRenamed("features", "inputs")
    original = estimator(featuresCol="inputs", predictionCol="guess", outputType="raw")
    model = original.fit(given, {original.epochs: 3})
    assert [epoch.epoch for epoch in model.history] == [1, 2, 3]
    assert original.getEpochs() == 1
    assert (model.getFeaturesCol(), model.getPredictionCol()) == ("inputs", "guess")
    assert model.getOutputType() == "raw"


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


@every_row(
    ("optimizer", partial(torch.optim.SGD, lr=0.1), r"has SGD\(lr=0.1\).*learningRate"),
    ("optimizer", torch.optim.Adam, "has Adam for optimizer.*names such as 'Adam'"),
    ("strategy", ParameterAveraging(), r"has ParameterAveraging\(.*\{'period': 10\}"),
    ("model", nn.Linear(4, 3), "has Linear for model.*Leave it out"),
    ("loss", lambda outputs, targets: outputs.mean(), "for loss"),
    ("learningRate", np.float32(0.1), "for learningRate.*ParamGridBuilder converts it"),
)
def test_a_search_that_could_not_be_saved_is_refused_before_its_first_fit(
    rows: DataFrame, name: str, value: Any, words: str
) -> None:
    stage = estimator(numWorkers=1)
    param = stage.getParam(name)
    grid = [{stage.batchSize: 5}, {param: value}]
    whole = Pipeline(stages=[assembler(), stage])
    search: Any
    for tried, search in ((stage, CrossValidator(numFolds=2)), (whole, TrainValidationSplit())):
        search.setEstimator(tried).setEstimatorParamMaps(grid)
        search.setEvaluator(MulticlassClassificationEvaluator())
        with no_jobs(rows.sparkSession), pytest.raises(ConfigError, match=words):
            search.fit(rows)
        tried.fitMultiple(rows, grid)
        assert tried.copy(grid[1]) is not tried


@every_row(
    ("model", named("torch.optim.sgd:SGD")),
    ("model", named("torch.nn.functional:relu")),
    ("model", bound("torch.nn.functional:relu", 1)),
    ("model", {"tuple": [1, 2]}),
    ("loss", named("torch.nn.modules.loss:CrossEntropyLoss")),
    ("loss", bound("torch.optim.sgd:SGD")),
    ("optimizer", named(RELU)),
    ("optimizer", made(RELU)),
    ("optimizer", named("torch.nn.functional:cross_entropy")),
    ("scheduler", named("torch.optim.sgd:SGD")),
    ("strategy", named("sparkdl.strategies.parameter_averaging:ParameterAveraging")),
    ("strategy", made(RELU)),
    ("batchTransform", named(RELU)),
)
def test_what_does_not_belong_in_a_place_is_refused(tmp_path: Path, place: str, spec: Json) -> None:
    with pytest.raises(ConfigError, match=f"{place} must be an?"):
        load_object({"recipe": spec}, tmp_path, place, expected=EXPECTED[place], trust=False)


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a first load imports is no deed of the model's."""
    load_module(saved_model(tmp_path_factory.mktemp("first"), bound(RELU)))


@every("load", [load_module, TorchModel.load, TorchEstimator.load])
@every("place", ["model", "optimizer", "strategy"])
def test_every_way_to_load_refuses_a_command(
    load: Callable[[str], Any], place: str, tmp_path: Path
) -> None:
    spec = {"recipe": made("os:system", command=f"touch {tmp_path / 'touched'}")}
    objects = {**OBJECTS, place: spec}
    metadata = {"uid": "stage", "paramMap": {}, "defaultParamMap": {}}
    path = saved_estimator(tmp_path, **{"objects.json": objects, "metadata/part-00000": metadata})
    saved_model(tmp_path, spec["recipe"])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"os:system.*trust=\['os'\]"), deeds() as done:
            load(path)
        assert done == []
    assert not (tmp_path / "touched").exists()


@every_row(
    ("metadata/part-00000", {**METADATA, "paramMap": {"fit": 3}}, r"Params that.*\['fit'\]"),
    ("metadata/part-00000", {**METADATA, "paramMap": {"epochs": "many"}}, "epochs must be"),
    ("metadata/part-00000", {**METADATA, "paramMap": {"tls": "yes"}}, "tls must be True or False"),
    ("metadata/part-00000", {**METADATA, "paramMap": {"model": "os:system"}}, "model must be"),
    ("metadata/part-00000", {"uid": "stage"}, "it has no paramMap"),
    ("metadata/part-00000", [METADATA], "no JSON object"),
    ("objects.json", {}, r"it contains \[\]"),
    ("objects.json", {**OBJECTS, "uid": OBJECTS["model"]}, "'uid'"),
    (
        "objects.json",
        {**OBJECTS, "loss": None},
        "loss was saved as None, which is not an object spec",
    ),
    ("objects.json", {**OBJECTS, "loss": {"recipe": {}}}, "which is not an object spec"),
    ("objects.json", {**OBJECTS, "loss": {"recipe": {"new": 3}}}, "object spec of loss is damaged"),
)
def test_a_damaged_estimator_is_refused_with_what_is_wrong(
    tmp_path: Path, file: str, content: Json, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchEstimator.load(saved_estimator(tmp_path, **{file: content}))


def test_a_model_whose_outputs_mean_nothing_known_is_refused(tmp_path: Path) -> None:
    metadata = {**METADATA, "class": "sparkdl.estimator.model.TorchModel", "paramMap": {}}
    path = saved_estimator(tmp_path, **{"metadata/part-00000": metadata})
    saved_model(tmp_path, named(RELU))
    description = (tmp_path / "module.json").read_text()
    (tmp_path / "module.json").write_text(description.replace('"logits"', '"os.system"'))
    with pytest.raises(ConfigError, match=r"unknown meaning of its outputs: 'os\.system'"):
        TorchModel.load(path)


@settings(max_examples=250, deadline=None)
@given(place=st.sampled_from(sorted(EXPECTED)), spec=specs)
@example(place="model", spec=made(SEQUENTIAL, args=made("os:system", command="touch here")))
@example(place="optimizer", spec=bound("torch.optim.sgd:SGD", lr=0.1))
@example(place="model", spec=bound(SEQUENTIAL, made(LINEAR, in_features=2, out_features=3)))
def test_no_recipe_does_anything_but_build_what_torch_has(
    place: str, spec: Json, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp()
    saved = {"recipe": spec}
    value = only_the_projects_errors(
        lambda: load_object(saved, directory, place, expected=EXPECTED[place], trust=False)
    )
    if value is not None:
        assert EXPECTED[place].takes(value, Trust())
    if place == "model":
        saved_model(directory / "model", spec)
        only_the_projects_errors(lambda: load_module(directory / "model"))


@settings(max_examples=120, deadline=None)
@given(description=damaged(DESCRIPTION))
@example(description={**DESCRIPTION, "features": [{"name": "x", "dtype": "load", "row_shape": []}]})
@example(
    description={**DESCRIPTION, "features": [{"name": "x", "dtype": "_dynamo", "row_shape": []}]}
)
def test_a_damaged_description_is_read_or_refused_in_words(
    description: Json, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = saved_model(tmp_path_factory.getbasetemp() / "damaged", named(RELU))
    save_file(nn.Linear(2, 3).state_dict(), directory / "module.safetensors")
    (directory / "module.json").write_text(json.dumps(description))
    saved = only_the_projects_errors(lambda: read_module(directory, trust=False))
    if saved is not None:
        assert all(isinstance(feature.dtype, torch.dtype) for feature in saved.features)
        assert isinstance(saved.module, nn.Module)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), file=st.sampled_from(sorted(FILES)))
def test_a_damaged_estimator_is_read_or_refused_in_words(
    data: st.DataObject, file: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = data.draw(damaged(FILES[file]))
    path = saved_estimator(tmp_path_factory.getbasetemp() / "estimator", **{file: content})
    only_the_projects_errors(lambda: TorchEstimator.load(path))


def test_every_class_of_torchs_bears_being_called_with_nonsense(tmp_path: Path) -> None:
    for path in SMALL:
        for spec in (
            bound(path, 3, "os.system", {"list": [1, "a"]}),
            bound(path, named(RELU), named(path)),
            made(path, weight=made(RELU), device="os.system"),
        ):
            directory = saved_model(tmp_path / "model", spec)
            only_the_projects_errors(partial(load_module, directory))
