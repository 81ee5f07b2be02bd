"""The Params about checkpoints: what they refuse, and that a fit resumes from a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from frames import estimator, frame, same_bits
from models import Traced, lines
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl.errors import ConfigError
from sparkdl.estimator.fit_settings import FitSettings
from sparkdl.protocols import Batch


def test_there_are_no_checkpoints_unless_asked_for() -> None:
    assert FitSettings(estimator()).checkpoint_policy() is None


def test_a_fit_goes_on_from_the_checkpoint_of_a_shorter_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows, path, trace = frame(spark), str(tmp_path / "checkpoints"), tmp_path / "trace"
    estimator(epochs=2, checkpointPath=path).fit(rows)
    whole = estimator(epochs=4).fit(rows)
    resumed = estimator(epochs=4, checkpointPath=path).fit(rows)
    assert same_bits(resumed, whole)
    assert [row.epoch for row in resumed.history] == [1, 2, 3, 4]

    again = estimator(epochs=4, checkpointPath=path, model=Traced(str(trace)))
    with pytest.raises(ConfigError, match="batch size: was 10, is now 3"):
        again.setBatchSize(3).fit(rows)
    assert lines(trace) == []


def test_the_rows_of_another_frame_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoints")
    estimator(checkpointPath=path).fit(frame(spark, rows=60))
    with pytest.raises(ConfigError, match=r"rows of each partition: was \[20, 20, 20\], is now \["):
        estimator(checkpointPath=path).fit(frame(spark, rows=64))


def smooth_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def same_batch(batch: Batch) -> Batch:
    return batch


def test_a_fit_that_has_ended_gives_its_model_for_the_same_training_only(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For a daily job another one's is yesterday's model."""
    path = str(tmp_path / "checkpoints")
    first = estimator(checkpointPath=path).fit(frame(spark))
    again = estimator(checkpointPath=path, timeout=250.0).fit(frame(spark))
    assert same_bits(again, first)
    assert "already ended with epoch 1: its model is returned without another step" in caplog.text

    others: dict[str, dict[str, Any]] = {
        "loss: was CrossEntropyLoss(), is now smooth_loss": {"loss": smooth_loss},
        "clip norm: was none, is now 0.5": {"clipNorm": 0.5},
        "precision: was float32, is now bf16": {"precision": "bf16"},
        "batch transform: was None, is now same_batch": {"batchTransform": same_batch},
        "weight: was none, is now id (float64)": {"weightCol": "id"},
        "label: was label (int64), is now id (int64)": {"labelCol": "id"},
        "model: was Sequential, is now Traced": {"model": Traced(str(tmp_path / "trace"))},
    }
    for line, changes in others.items():
        with pytest.raises(ConfigError, match=re.escape(line)):
            estimator(checkpointPath=path, **changes).fit(frame(spark))
    turned = F.when(F.col("id") == 41, F.reverse("features")).otherwise(F.col("features"))
    with pytest.raises(ConfigError, match="the training rows have different values"):
        estimator(checkpointPath=path).fit(frame(spark).withColumn("features", turned))
    assert lines(tmp_path / "trace") == []


def test_a_directory_that_cannot_be_made_fails_before_training(
    spark: SparkSession, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    with pytest.raises(ConfigError, match="checkpointPath '/dev/null/x' cannot be used"):
        estimator(checkpointPath="/dev/null/x", model=Traced(str(trace))).fit(frame(spark))
    assert lines(trace) == []
