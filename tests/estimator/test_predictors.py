"""Classifier and regressor in the places of pyspark.ml's own, on real executors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from frames import CLASSES, WIDTH, descended, features_of, frame, labels_of
from models import Net
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import OneVsRest
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import IndexToString, StringIndexer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from sparkdl import (
    TorchClassificationModel,
    TorchClassifier,
    TorchRegressionModel,
    TorchRegressor,
    trusted_modules,
)
from sparkdl.callbacks import Callback, Training
from sparkdl.checkpoint.module_files import SavedModule
from sparkdl.errors import CallbackError, ConfigError, DataError

ROWS = 60
IDS = np.arange(ROWS)
SETTINGS: dict[str, Any] = {
    "optimizer": partial(torch.optim.SGD, lr=0.5),
    "batchSize": 10,
    "numWorkers": 2,
    "seed": 7,
    "progress": False,
    "timeout": 150.0,
}
NAMES = np.array(["cat", "ant", "bee"])
SORTED = ["ant", "bee", "cat"]


def network(classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, classes))


def scores(module: nn.Module) -> np.ndarray:
    with torch.no_grad():
        found = module(torch.tensor(features_of(IDS), dtype=torch.float32))
    return found.double().numpy()


def named(rows: DataFrame) -> DataFrame:
    return rows.withColumn("label", F.array(*map(F.lit, NAMES.tolist()))[F.col("label")])


@pytest.mark.nightly
@pytest.mark.versions
def test_texts_are_classes_and_the_columns_are_those_of_pyspark(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = named(frame(spark, ROWS))
    settings = {**SETTINGS, "batchSize": ROWS}  # a step on all rows, wherever they are
    model = TorchClassifier(model=network(), epochs=12, **settings).fit(rows)
    assert (model.getLabels(), model.numClasses, model.getLabelCol()) == (SORTED, 3, "label")
    assert model.summary.recording.setup.settings["labelCol"] == "label"
    added = model.transform(rows)
    assert added.columns[-3:] == ["rawPrediction", "probability", "prediction"]
    found = added.orderBy("id").collect()
    raw = scores(model.module)
    np.testing.assert_allclose([r["rawPrediction"].toArray() for r in found], raw, rtol=1e-6)
    exponents = np.exp(raw)
    expected = exponents / exponents.sum(1, keepdims=True)
    np.testing.assert_allclose([r["probability"].toArray() for r in found], expected, rtol=1e-5)
    predicted = [row["prediction"] for row in found]
    np.testing.assert_array_equal(predicted, raw.argmax(1))
    # It has learned these classes, not others.
    targets = np.array([SORTED.index(name) for name in NAMES[labels_of(IDS)]])
    oracle = descended(network(), targets, lr=0.5, steps=12)
    np.testing.assert_allclose(raw, scores(oracle), rtol=1e-4, atol=1e-5)
    # IndexToString finds the labels in the column.
    texts = IndexToString(inputCol="prediction", outputCol="name").transform(added)
    assert [r["name"] for r in texts.orderBy("id").collect()] == [SORTED[int(p)] for p in predicted]
    # An evaluator of texts that StringIndexer has indexed the same way.
    indexer = StringIndexer(inputCol="label", outputCol="y", stringOrderType="alphabetAsc")
    evaluator = MulticlassClassificationEvaluator(labelCol="y", metricName="accuracy")
    accuracy = pytest.approx(sk.accuracy_score(targets, predicted))
    assert evaluator.evaluate(indexer.fit(rows).transform(added)) == accuracy
    # The loss of each row, by the same indices; the column that has them does not stay.
    scored = model.setLossCol("loss").transform(rows)
    assert scored.columns == [*added.columns, "loss"]
    losses = -np.log(expected)[IDS, targets]
    got = [row["loss"] for row in scored.orderBy("id").collect()]
    np.testing.assert_allclose(got, losses, rtol=1e-4, atol=1e-6)
    metrics = {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}
    path = str(tmp_path / "model")
    model.setThresholds([1e-9, 1.0, 1.0]).write().save(path)
    loaded = TorchClassificationModel.load(path, trust=True)
    assert loaded.evaluate(rows, metrics) == {"accuracy": accuracy}
    again = loaded.transform(rows).orderBy("id").collect()
    assert {row["prediction"] for row in again} == {0.0}
    assert [row["loss"] for row in again] == got
    taken = rows.withColumn("probability", F.lit(1))
    with pytest.raises(DataError, match=r"model\.setProbabilityCol"):
        loaded.transform(taken)


class FailsInTheEnd(Callback):
    def on_end(self, training: Training, error: BaseException | None) -> None:
        raise KeyError("nobody has it")


@pytest.mark.gate
def test_a_model_that_comes_with_an_error_has_the_columns_that_were_named(
    spark: SparkSession,
) -> None:
    rows, names = named(frame(spark, ROWS)), {"predictionCol": "mine"}
    broken = TorchClassifier(model=network(), callbacks=[FailsInTheEnd()], **SETTINGS, **names)
    with pytest.raises(CallbackError) as caught:
        broken.fit(rows)
    model = caught.value.model
    assert isinstance(model, TorchClassificationModel)
    assert len(model.history) == 1
    assert (model.getLabels(), model.getLabelCol()) == (SORTED, "label")
    assert len(model.transform(rows).select("mine").collect()) == ROWS


@pytest.mark.gate
def test_numbers_are_classes_by_their_labels_and_evaluators_compare_those(
    spark: SparkSession,
) -> None:
    values = [30.0, 10.5, 20.0]
    rows = frame(spark, ROWS).withColumn("label", F.array(*map(F.lit, values))[F.col("label")])
    classifier = TorchClassifier(model=network(), labels=values, epochs=1, **SETTINGS)
    model = classifier.fit(rows)
    added = model.transform(rows)
    predicted = np.array(values)[scores(model.module).argmax(1)]
    found = [row["prediction"] for row in added.orderBy("id").collect()]
    np.testing.assert_array_equal(found, predicted)
    expected = sk.accuracy_score(
        np.array(values)[labels_of(IDS)].astype(str), predicted.astype(str)
    )
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    assert evaluator.evaluate(added) == pytest.approx(expected)
    metrics = {"a": MulticlassAccuracy(CLASSES, average="micro")}
    assert model.evaluate(rows, metrics)["a"] == pytest.approx(expected)
    with pytest.raises(DataError, match=r"'label' holds 30\.0, which is not among labels=\[10\.5"):
        classifier.setLabels([10.5, 20.0, 31.0]).fit(rows)


@pytest.mark.gate
@pytest.mark.parametrize("labels", [[True, False], None], ids=["true-first", "in-order"])
def test_a_column_of_booleans_is_learned_predicted_measured_and_saved(
    spark: SparkSession, tmp_path: Path, labels: list[bool] | None
) -> None:
    truth = features_of(IDS)[:, 0] > 0
    rows = frame(spark, ROWS).withColumn("label", F.col("features")[0] > 0)
    classifier = TorchClassifier(
        model=network(2), labels=labels, epochs=6, lossCol="loss", **SETTINGS
    )
    model = classifier.fit(rows)
    model.write().save(str(tmp_path / "model"))
    loaded = TorchClassificationModel.load(str(tmp_path / "model"), trust=True)
    assert (loaded.getLabels(), loaded.numClasses) == (labels, 2)
    raw = scores(model.module)
    of_true = 0 if labels else 1
    expected = (raw.argmax(1) == of_true).astype(float)
    assert sk.accuracy_score(truth, expected) > 0.9
    probabilities = np.exp(raw) / np.exp(raw).sum(1, keepdims=True)
    losses = -np.log(np.where(truth, probabilities[:, of_true], probabilities[:, 1 - of_true]))
    added = loaded.transform(rows)
    found = added.orderBy("id").collect()
    np.testing.assert_array_equal([row["prediction"] for row in found], expected)
    np.testing.assert_allclose([row["loss"] for row in found], losses, rtol=1e-4, atol=1e-6)
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    accuracy = pytest.approx(sk.accuracy_score(truth, expected))
    assert evaluator.evaluate(added.withColumn("label", F.col("label").cast("double"))) == accuracy
    metrics = {"accuracy": MulticlassAccuracy(2, average="micro")}
    assert loaded.evaluate(rows, metrics) == {"accuracy": accuracy}


@pytest.mark.nightly
@pytest.mark.versions
def test_a_pipeline_keeps_string_indexer_s_labels_and_is_saved_without_a_pickle(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = named(frame(spark, ROWS))
    indexer = StringIndexer(inputCol="label", outputCol="y", stringOrderType="alphabetDesc")
    classifier = TorchClassifier(model=Net, labelCol="y", featuresCol="features", **SETTINGS)
    path = str(tmp_path / "pipeline")
    Pipeline(stages=[indexer, classifier]).write().save(path)
    with trusted_modules("models"):
        fitted = Pipeline.load(path).fit(rows)
        fitted.write().save(path + "-fitted")
        again = PipelineModel.load(path + "-fitted")
    assert not list(tmp_path.rglob("*.pkl"))
    assert again.stages[-1].getLabels() == SORTED[::-1]
    both = [stage.transform(rows).orderBy("id").collect() for stage in (fitted, again)]
    assert [row["probability"] for row in both[0]] == [row["probability"] for row in both[1]]


@pytest.mark.versions
def test_a_regressor_passes_its_evaluator_and_is_saved(spark: SparkSession, tmp_path: Path) -> None:
    rows = frame(spark, ROWS).withColumn("label", F.col("features")[0] * 2 + 1)
    linear = partial(nn.Linear, WIDTH, 1)
    estimator = TorchRegressor(model=linear, epochs=3, lossCol="error", **SETTINGS)
    estimator.write().save(str(tmp_path / "estimator"))
    estimator = TorchRegressor.load(str(tmp_path / "estimator"))
    assert isinstance(estimator.getLoss(), nn.MSELoss)
    assert not estimator.isSet("loss")
    model = estimator.fit(rows)
    predicted, targets = scores(model.module)[:, 0], features_of(IDS)[:, 0] * 2 + 1
    expected = sk.mean_squared_error(targets, predicted)
    model.write().save(str(tmp_path / "model"))
    added = TorchRegressionModel.load(str(tmp_path / "model")).transform(rows)
    found = RegressionEvaluator(metricName="mse").evaluate(added)
    assert found == pytest.approx(expected, rel=1e-5)
    errors = [row["error"] for row in added.orderBy("id").collect()]
    np.testing.assert_allclose(errors, (predicted - targets) ** 2, rtol=1e-3, atol=1e-6)
    without = model.copy().setLossCol(None)
    without.write().save(str(tmp_path / "without"))
    with pytest.raises(ConfigError, match="lossCol='e' needs the loss, which the model does not"):
        TorchRegressionModel.load(str(tmp_path / "without")).setLossCol("e").transform(rows)


@pytest.mark.nightly
def test_one_versus_rest_takes_the_classifier(spark: SparkSession) -> None:
    rows = frame(spark, ROWS).withColumn("label", F.col("label").cast("double"))
    binary = TorchClassifier(model=network(1), loss=nn.BCEWithLogitsLoss(), **SETTINGS)
    model = OneVsRest(classifier=binary).fit(rows)
    raw = np.stack([scores(each.module)[:, 0] for each in model.models], axis=1)
    added = model.transform(rows).orderBy("id").collect()
    np.testing.assert_array_equal([row["prediction"] for row in added], raw.argmax(1))


def test_what_is_no_label_column_of_classes_is_refused(spark: SparkSession) -> None:
    rows, label = frame(spark), F.col("label")
    refused: list[tuple[dict[str, Any], DataFrame, str]] = [
        ({}, rows.withColumn("label", F.lit("only")), "'label' holds 1 different strings"),
        ({"labelCols": ["label", "id"]}, rows, "one label column, but labelCols names label, id"),
        (
            {"labels": ["true", "false"]},
            rows.withColumn("label", label > 0),
            "'label' holds booleans, but labels are strings",
        ),
        (
            {},
            rows.withColumn("label", F.current_timestamp()),
            r"'label' holds timestamps: .*session's time zone",
        ),
        ({"labelCol": "nowhere"}, rows, "labelCol names the column 'nowhere', which"),
        (
            {},
            named(rows).where("label != 'cat'"),
            "distinguishes 3 classes, but there are 2 labels",
        ),
    ]
    for changes, given, words in refused:
        with pytest.raises((ConfigError, DataError), match=words):
            TorchClassifier(model=network(), **SETTINGS, **changes).fit(given)


def test_a_model_whose_outputs_stand_for_the_labels_in_another_order_is_no_start(
    spark: SparkSession,
) -> None:
    rows, module = named(frame(spark)), network()
    made_of = SavedModule(module, module, (), "logits", {None: CLASSES}, ())
    before = TorchClassificationModel(made_of).setLabels(["cat", "ant", "dog"])
    told = r"'ant' is class 0 of .*'label', but class 1 of warm_start.*labels=warm_start\.getLabels"
    with pytest.raises(ConfigError, match=told):
        TorchClassifier(model=network(), **SETTINGS).fit(rows, warm_start=before)


@pytest.mark.gate
def test_columns_may_have_any_names(spark: SparkSession) -> None:
    texts = F.array(*map(F.lit, NAMES.tolist()))
    for name in ("my.column", "a `quoted` one"):
        rows = frame(spark, ROWS).select(
            F.col("features").alias(f"{name} f"), texts[F.col("label")].alias(f"{name} l")
        )
        model = TorchClassifier(
            model=network(),
            epochs=1,
            **SETTINGS,
            featuresCol=f"{name} f",
            labelCol=f"{name} l",
            predictionCol=name,
            rawPredictionCol=f"{name} r",
            probabilityCol=f"{name} p",
            lossCol=f"{name} s",
        ).fit(rows)
        added = model.transform(rows)
        assert added.schema[name].metadata["ml_attr"]["vals"] == SORTED
        assert len(added.collect()) == ROWS
        measured = model.evaluate(rows, {"a": MulticlassAccuracy(CLASSES)})
        assert 0 <= float(str(measured["a"])) <= 1
