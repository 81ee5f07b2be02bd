"""Rows of unequal length in fit, transform and SQL, against rows that nobody has padded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from frames import Refuse, estimator, same_bits
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sequence_models import WORDS, Bag, EachItem, Named, alone, label_of, mean_of, tokens_of
from torch import nn

from sparkdl import ParameterAveraging, TorchModel
from sparkdl.errors import ConfigError, DataError, ModelError

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
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
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
    rows: DataFrame, spark: SparkSession, tmp_path: Path
) -> None:
    model = estimator(
        **SETTINGS,
        epochs=3,
        outputType="raw",
        groupByLength=True,
        checkpointPath=str(tmp_path / "c"),
    ).fit(rows)
    oracle = alone(ROWS, 3, LR)
    for mine, wanted in zip(model.module.parameters(), oracle.parameters(), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-6)
    assert np.allclose(predicted(model.transform(rows)), answers(oracle), atol=1e-5)
    # A minibatch's answers do not depend on who shares it, nor on a save between.
    model.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"), trust=["sequence_models"])
    loaded.setPredictBatchSize(4)
    in_sql = rows.select("id", loaded.udf()("tokens").alias("prediction"))
    assert np.allclose(predicted(in_sql), answers(oracle), atol=1e-5)
    with pytest.raises(ConfigError, match="batch size: was 90, grouped by length, is now 90"):
        estimator(**SETTINGS, epochs=3, checkpointPath=str(tmp_path / "c")).fit(rows)
    changed = {**SETTINGS, "padCols": {"tokens": 1}, "groupByLength": True}
    with pytest.raises(ConfigError, match=r"features: was tokens .*padded with 0, padding_mask"):
        estimator(**changed, epochs=3, checkpointPath=str(tmp_path / "c")).fit(rows)


@pytest.mark.nightly
def test_what_was_interrupted_goes_on_with_the_same_bits(rows: DataFrame, tmp_path: Path) -> None:
    settings = {
        **SETTINGS,
        "batchSize": 7,
        "storeIn": "memory",
        "validationFraction": 0.2,
        "reshuffleEvery": 1,
    }
    whole = estimator(**settings, epochs=3).fit(rows)
    path = str(tmp_path / "checkpoints")
    estimator(**settings, epochs=2, checkpointPath=path).fit(rows)
    resumed = estimator(**settings, epochs=3, checkpointPath=path).fit(rows)
    assert same_bits(whole, resumed)
    assert [epoch.epoch for epoch in resumed.history] == [1, 2, 3]
    assert all(np.isfinite(epoch.validation_loss) for epoch in resumed.history)


def test_a_pretrained_module_takes_hugging_faces_names(rows: DataFrame) -> None:
    module = Named().eval()
    model = TorchModel.from_module(
        module,
        {"input_ids": torch.ones(2, 5, dtype=torch.int64)},
        padCols={"input_ids": WORDS - 1},
        padInputs={"input_ids": "attention_mask"},
        featuresAs="kwargs",
        predictBatchSize=8,
    )
    named = rows.withColumnRenamed("tokens", "input_ids")
    assert np.allclose(predicted(model.transform(named)), answers(module.bag), atol=1e-6)
    with pytest.raises(ModelError, match=r"5 numbers per row .*4 for shorter rows"):
        TorchModel.from_module(
            EachItem(),
            torch.ones(2, 5, dtype=torch.int64),
            featuresCol="tokens",
            padCols={"tokens": 0},
        )


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"padCols": None}, DataError, "padCols={'tokens': 0}"),
    ({"padCols": {"token": 0}}, ConfigError, "padCols names 'token'"),
    ({"padCols": {"tokens": 0.5}}, ConfigError, "with 0.5, which its int64 tensor cannot hold"),
    (
        {"padCols": {"tokens": -1}, "columnDtypes": {"tokens": "uint8"}},
        ConfigError,
        "with -1, which its uint8 tensor cannot hold",
    ),
    ({"padCols": {"tokens": 0, "label": 0}}, ConfigError, "'label' (int), which has no length"),
    ({"columnShapes": {"tokens": [12]}}, ConfigError, "only the length of its rows may be open"),
    (
        {"padCols": None, "columnShapes": {"tokens": [None]}},
        ConfigError,
        "leaves the length of column 'tokens' open",
    ),
    ({"padInputs": {"label": "lengths"}}, ConfigError, "which padCols does not: only padded"),
    ({"padCols": None, "groupByLength": True}, ConfigError, "padCols names no column"),
    ({"padInputs": {}}, ModelError, "its forward takes (tokens, padding_mask)"),
    ({"model": nn.Linear(2, 3)}, ModelError, "called as model(tokens, padding_mask)"),
    ({"padInputs": {"tokens": "lengths"}}, ModelError, "int64 (2, 12), int64 (2,)"),
    ({"model": EachItem, "loss": mean_of}, ModelError, "return a mean over the items"),
    ({"padCols": {"tokens": WORDS}}, ModelError, "index out of range"),
]


@every(("changes", "error", "words"), REFUSED)
def test_what_does_not_go_with_padding_is_refused_in_words(
    rows: DataFrame, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        estimator(**{**SETTINGS, **changes}).fit(rows)
    assert words in str(caught.value)


def test_a_word_that_the_embedding_lacks_is_named_with_its_row_before_anybody_trains(
    rows: DataFrame, refuse: Refuse
) -> None:
    strange = rows.withColumn(
        "tokens", F.when(F.col("id") == 41, F.array(F.lit(WORDS))).otherwise(F.col("tokens"))
    )
    message = refuse(
        strange, ModelError, "'tokens' from 1", f"to {WORDS} (row", **{**SETTINGS, "model": Bag}
    )
    assert "padding_mask" not in message or "bool" in message
