"""Columns that a model gives, and sequences that it takes."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from every_row import every_row
from frames import Refuse, estimator, features_of, frame, labels_of, no_jobs
from models import OwnLoss, lines
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sequence_models import WORDS, Bag, EachItem, Named, alone, label_of, mean_of, tokens_of
from torch import Tensor

from sparkdl import ParameterAveraging, TorchEstimator, TorchModel
from sparkdl.errors import ConfigError, DataError, ModelError

IDS = range(60)
BOTH = {"prediction": "logits", "embedding": "pooled"}


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    held_out = F.col("id") % 4 == 0
    scaled = frame(spark).withColumn("scale", F.col("id") / 60).withColumn("held_out", held_out)
    return scaled.withColumn("labels", F.col("label").cast("long"))


def own_loss(**changes: Any) -> TorchEstimator:
    settings = {
        "model": OwnLoss(),
        "loss": "model",
        "featuresCols": ["scale", "features"],
        "featuresAs": "kwargs",
        "validationIndicatorCol": "held_out",
        "outputCols": BOTH,
        "outputType": "class",
    }
    return estimator(**{**settings, **changes})


@pytest.fixture(scope="module")
def fitted(rows: DataFrame) -> TorchModel:
    return own_loss(epochs=3).fit(rows)


def by_torch(model: TorchModel) -> tuple[Tensor, Tensor]:
    """Logits and pooled of all rows, layer by layer."""
    features = torch.tensor(features_of(IDS), dtype=torch.float32)
    scale = torch.arange(60) / 60
    with torch.no_grad():
        pooled = model.module.body(features).tanh()
        return model.module.head(pooled * scale[:, None]), pooled


def column(predicted: DataFrame, name: str) -> np.ndarray:
    found = [row[0] for row in predicted.orderBy("id").select(name).collect()]
    return np.array([v.toArray() if hasattr(v, "toArray") else v for v in found])


def test_each_chosen_output_is_a_column_and_the_prediction_is_of_the_output_type(
    fitted: TorchModel, rows: DataFrame, tmp_path: Path
) -> None:
    """Also of a saved model."""
    logits, pooled = by_torch(fitted)
    fitted.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"), trust=True)
    assert loaded.getOutputCols() == BOTH
    predicted = loaded.transform(rows)
    assert predicted.columns == [*rows.columns, *BOTH]
    assert predicted.schema["prediction"].dataType.simpleString() == "double"
    assert predicted.schema["embedding"].dataType.simpleString() == "vector"
    assert np.array_equal(column(predicted, "prediction"), logits.argmax(dim=1).numpy())
    assert np.allclose(column(predicted, "embedding"), pooled.numpy(), atol=1e-6)


def test_the_loss_of_held_out_rows_is_that_of_torch(fitted: TorchModel) -> None:
    held_out = [i for i in IDS if i % 4 == 0]
    logits, _ = by_torch(fitted)
    expected = functional.cross_entropy(logits[held_out], torch.tensor(labels_of(held_out)))
    first, *_, last = [epoch.validation_loss for epoch in fitted.history]
    assert last == pytest.approx(expected.item(), rel=1e-5)
    assert first != last


def test_a_model_runs_once_for_all_of_its_columns(rows: DataFrame, tmp_path: Path) -> None:
    path = str(tmp_path / "passes")
    example = {"features": torch.zeros(1, 4), "scale": torch.zeros(1)}
    model = TorchModel.from_module(
        OwnLoss(path), example, featuresAs="kwargs", outputCols=BOTH, outputType="raw"
    )
    model.transform(rows.coalesce(1)).select(*BOTH).collect()
    (line,) = [each for each in lines(path) if int(each.split()[0]) != os.getpid()]
    assert line.endswith("False")


def test_other_outputs_may_be_chosen_of_a_fitted_model(fitted: TorchModel, rows: DataFrame) -> None:
    logits, _ = by_torch(fitted)
    other = fitted.copy().setOutputCols({"scores": "logits"}).setOutputType("raw")
    assert np.allclose(column(other.transform(rows), "scores"), logits.numpy(), atol=1e-6)
    with pytest.raises(
        ConfigError, match=r"'p' asks for output 'logit', .* outputs are 'logits', 'pooled'"
    ):
        fitted.copy().setOutputCols({"p": "logit"}).setPredictionCol("p").transform(rows)
    with pytest.raises(ConfigError, match="the model's outputs are 'logits', 'pooled'"):
        fitted.copy().setOutputCols(None).transform(rows)


def test_a_column_that_is_there_already_is_refused(fitted: TorchModel, rows: DataFrame) -> None:
    with pytest.raises(DataError, match=r"has a column 'embedding'.*setOutputCols"):
        fitted.transform(rows.withColumn("embedding", F.lit(1)))


@every_row(
    ({"outputCols": None}, ModelError, ["several outputs", "'pooled' float32 (5, 5)"]),
    ({"outputCols": {"p": "logit"}, "outputType": "auto"}, ModelError, ["'logits' float32"]),
    ({"outputCols": {"p": "layers"}, "outputType": "auto"}, ModelError, ["not a tensor"]),
    ({"predictionCol": "p"}, ConfigError, ["outputType='class'", "no column 'p'"]),
)
def test_what_cannot_be_chosen_is_refused_before_training(
    rows: DataFrame, refuse: Refuse, changes: dict[str, Any], error: Any, fragments: list[str]
) -> None:
    settings = own_loss(**changes)
    given = {p.name: settings.getOrDefault(p) for p in settings.params if settings.isSet(p)}
    del given["model"]
    refuse(rows, error, *fragments, **{"model": OwnLoss(), **given})


@every_row(
    ({"weightCol": "scale"}, "weightCol cannot be combined with loss='model'"),
    ({"featuresCols": ["labels", "features"]}, "'labels' twice"),
)
def test_columns_that_a_models_own_loss_cannot_have_are_refused_before_any_job(
    rows: DataFrame, changes: dict[str, Any], words: str
) -> None:
    with no_jobs(rows.sparkSession), pytest.raises(ConfigError, match=words):
        own_loss(**changes).fit(rows)


ROWS, LR = 90, 0.5
SETTINGS: dict[str, Any] = {
    "model": Bag,
    "featuresCol": "tokens",
    "padCols": {"tokens": 0},
    "optimizer": partial(torch.optim.SGD, lr=LR),
    "strategy": ParameterAveraging(period=1),
    "batchSize": ROWS,  # so that a step is one of gradient descent on all rows
}


@pytest.fixture(scope="module")
def sequences(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """(id, tokens array<int>, label) in two files of as many rows."""
    path = str(tmp_path_factory.mktemp("sequences") / "rows")
    table = [(row, tokens_of(row), label_of(row)) for row in range(ROWS)]
    spark.createDataFrame(table, "id int, tokens array<int>, label int").repartition(
        2
    ).write.parquet(path)
    return spark.read.parquet(path)


def answers(module: Any) -> np.ndarray:
    with torch.no_grad():
        return torch.stack([module.row(tokens_of(row)) for row in range(ROWS)]).numpy()


def predicted(frame: DataFrame) -> np.ndarray:
    found = {row.id: row.prediction for row in frame.select("id", "prediction").collect()}
    return np.array([list(found[row]) for row in range(ROWS)])


def test_a_fit_on_executors_is_gradient_descent_on_rows_that_nobody_padded(
    sequences: DataFrame, spark: SparkSession, tmp_path: Path
) -> None:
    model = estimator(
        **SETTINGS,
        epochs=3,
        outputType="raw",
        groupByLength=True,
        checkpointPath=str(tmp_path / "c"),
    ).fit(sequences)
    oracle = alone(ROWS, 3, LR)
    for mine, wanted in zip(model.module.parameters(), oracle.parameters(), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-6)
    assert np.allclose(predicted(model.transform(sequences)), answers(oracle), atol=1e-5)
    # A minibatch's answers do not depend on who shares it, nor on a save between.
    model.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"), trust=["sequence_models"])
    loaded.setPredictBatchSize(4)
    in_sql = sequences.select("id", loaded.udf()("tokens").alias("prediction"))
    assert np.allclose(predicted(in_sql), answers(oracle), atol=1e-5)
    with pytest.raises(ConfigError, match="batch size: was 90, grouped by length, is now 90"):
        estimator(**SETTINGS, epochs=3, checkpointPath=str(tmp_path / "c")).fit(sequences)
    changed = {**SETTINGS, "padCols": {"tokens": 1}, "groupByLength": True}
    with pytest.raises(ConfigError, match=r"features: was tokens .*padded with 0, padding_mask"):
        estimator(**changed, epochs=3, checkpointPath=str(tmp_path / "c")).fit(sequences)


def test_a_pretrained_module_takes_hugging_faces_names(sequences: DataFrame) -> None:
    module = Named().eval()
    model = TorchModel.from_module(
        module,
        {"input_ids": torch.ones(2, 5, dtype=torch.int64)},
        padCols={"input_ids": WORDS - 1},
        padInputs={"input_ids": "attention_mask"},
        featuresAs="kwargs",
        predictBatchSize=8,
    )
    named = sequences.withColumnRenamed("tokens", "input_ids")
    assert np.allclose(predicted(model.transform(named)), answers(module.bag), atol=1e-6)
    with pytest.raises(ModelError, match=r"5 numbers per row .*4 for shorter rows"):
        TorchModel.from_module(
            EachItem(),
            torch.ones(2, 5, dtype=torch.int64),
            featuresCol="tokens",
            padCols={"tokens": 0},
        )


AT_ONCE: list[tuple[dict[str, Any], str]] = [
    ({"padCols": {"token": 0}}, "padCols names 'token'"),
    ({"padCols": {"tokens": 0.5}}, "with 0.5, which its int64 tensor cannot hold"),
    (
        {"padCols": {"tokens": -1}, "columnDtypes": {"tokens": "uint8"}},
        "with -1, which its uint8 tensor cannot hold",
    ),
    ({"padCols": {"tokens": 0, "label": 0}}, "'label' (int), which has no length"),
    ({"columnShapes": {"tokens": [12]}}, "only the length of its rows may be open"),
    ({"columnShapes": {"tokens": [None, 2]}}, "Items of several numbers are arrays in an array"),
    (
        {"padCols": None, "columnShapes": {"tokens": [None]}},
        "leaves the length of column 'tokens' open",
    ),
    ({"padInputs": {"label": "lengths"}}, "which padCols does not: only padded"),
    ({"padCols": None, "groupByLength": True}, "padCols names no column"),
]
BY_THE_ROWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"padCols": None}, DataError, "padCols={'tokens': 0}"),
    ({"padInputs": {}}, ModelError, "its forward takes (tokens, padding_mask)"),
    ({"padInputs": {"tokens": "lengths"}}, ModelError, "int64 (2, 12), int64 (2,)"),
    ({"model": EachItem, "loss": mean_of}, ModelError, "return a mean over the items"),
    ({"padCols": {"tokens": WORDS}}, ModelError, "index out of range"),
]


@every_row(*AT_ONCE)
def test_what_does_not_go_with_padding_is_refused_before_any_job(
    sequences: DataFrame, changes: dict[str, Any], words: str
) -> None:
    with no_jobs(sequences.sparkSession), pytest.raises(ConfigError, match=re.escape(words)):
        estimator(**{**SETTINGS, **changes}).fit(sequences)


@every_row(*BY_THE_ROWS)
def test_what_does_not_go_with_padding_is_refused_in_words(
    sequences: DataFrame, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        estimator(**{**SETTINGS, **changes}).fit(sequences)


def test_a_word_that_the_embedding_lacks_is_named_with_its_row_before_anybody_trains(
    sequences: DataFrame, refuse: Refuse
) -> None:
    strange = sequences.withColumn(
        "tokens", F.when(F.col("id") == 41, F.array(F.lit(WORDS))).otherwise(F.col("tokens"))
    )
    message = refuse(
        strange, ModelError, "'tokens' from 1", f"to {WORDS} (row", **{**SETTINGS, "model": Bag}
    )
    assert "padding_mask" not in message or "bool" in message
