"""The Param ``callbacks``: what it takes, that it has an effect, and that it can be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from frames import estimator, frame
from models import Net
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparkdl import TorchEstimator
from sparkdl.callbacks import Callback, EarlyStopping, TimeBudget
from sparkdl.errors import ConfigError


class MyOwn(Callback):
    """What a user may write."""


def test_a_fit_stops_early_with_the_best_model(spark: SparkSession) -> None:
    rows = frame(spark).withColumn("held", F.col("id") % 3 == 0)
    settings: dict[str, Any] = {"validationIndicatorCol": "held", "numWorkers": 2}
    stopping = EarlyStopping(patience=2, min_delta=10.0)  # no loss falls by so much
    stopped = estimator(epochs=50, callbacks=[stopping], **settings).fit(rows)
    assert len(stopped.history) == 3
    straight = estimator(epochs=1, **settings).fit(rows)
    for mine, other in zip(stopped.module.parameters(), straight.module.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_callbacks_are_saved_with_the_estimator(spark: SparkSession, tmp_path: Path) -> None:
    callbacks = [EarlyStopping("loss", patience=7), TimeBudget(60.0)]
    path = str(tmp_path / "estimator")
    estimator(model=Net, callbacks=callbacks).write().save(path)
    assert TorchEstimator.load(path, trust=["models"]).getCallbacks() == callbacks


def test_one_of_ones_own_needs_trust(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "estimator")
    estimator(model=Net, callbacks=[MyOwn()]).write().save(path)
    with pytest.raises(ConfigError, match="callbacks was saved as a pickle"):
        TorchEstimator.load(path, trust=["models"])
    assert isinstance(TorchEstimator.load(path, trust=True).getCallbacks()[0], MyOwn)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (EarlyStopping(), "must be a list"),
        ([EarlyStopping], "has the class EarlyStopping: call it"),
        ([print], "has <built-in function print>"),
    ],
)
def test_what_is_no_list_of_callbacks_is_refused(
    spark: SparkSession, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        estimator(callbacks=value)
