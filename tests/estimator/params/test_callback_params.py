"""The Param ``callbacks``: what it takes, that it has an effect, and that it can be saved."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from frames import estimator, frame
from models import Net
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparkdl import TorchEstimator
from sparkdl.callbacks import (
    Callback,
    EarlyStopping,
    WorkerCallback,
    WorkerStep,
)
from sparkdl.errors import ConfigError, ModelError
from sparkdl.estimator.fit_settings import FitSettings

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class MyOwn(Callback):
    """What a user may write."""


class Steps(WorkerCallback):
    """Leaves a file for each rank and step, which only a worker's process can."""

    def __init__(self, directory: str, driver: int) -> None:
        self.directory = directory
        self.driver = driver

    def after_step(self, step: WorkerStep) -> None:
        assert os.getpid() != self.driver
        Path(self.directory, f"{step.rank}-{step.step}").touch()


@pytest.mark.nightly
def test_a_fit_stops_early_with_the_best_model_and_workers_tell_of_steps(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = frame(spark).withColumn("held", F.col("id") % 3 == 0)
    settings: dict[str, Any] = {"validationIndicatorCol": "held", "numWorkers": 2}
    stopping = EarlyStopping(patience=2, min_delta=10.0)  # no loss falls by so much
    callbacks = [stopping, Steps(str(tmp_path), os.getpid())]
    stopped = estimator(epochs=50, callbacks=callbacks, **settings).fit(rows)
    assert len(stopped.history) == 3
    # 20 rows a worker in batches of 10, three epochs
    expected = {f"{rank}-{step}" for rank in range(2) for step in range(1, 7)}
    assert {path.name for path in tmp_path.iterdir()} == expected
    straight = estimator(epochs=1, **settings).fit(rows)
    for mine, other in zip(stopped.module.parameters(), straight.module.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_one_of_ones_own_needs_trust(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "estimator")
    estimator(model=Net, callbacks=[MyOwn(), Steps("here", 0)]).write().save(path)
    with pytest.raises(ConfigError, match="callbacks was saved as a pickle"):
        TorchEstimator.load(path, trust=["models"])
    mine, steps = TorchEstimator.load(path, trust=True).getCallbacks()
    assert isinstance(mine, MyOwn)
    assert isinstance(steps, Steps)
    assert steps.directory == "here"


def test_one_that_cannot_travel_to_the_workers_is_told_of(spark: SparkSession) -> None:
    with pytest.raises(ModelError, match=r"callbacks cannot be sent .* callbacks\[0\]\.driver"):
        estimator(callbacks=[Steps("here", threading.Lock())]).fit(frame(spark))  # type: ignore[arg-type]


def test_none_takes_them_away() -> None:
    assert estimator(callbacks=[MyOwn()]).setCallbacks(None).getCallbacks() is None
    assert FitSettings(estimator(callbacks=None)).driver_callbacks == []
