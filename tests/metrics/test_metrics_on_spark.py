"""Metrics by the estimator and by ``model.evaluate``, on real executors."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every_row
from frames import CLASSES, WIDTH, estimator, features_of, frame, labels_of
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from test_metrics_in_training import MAKERS as METRICS
from test_metrics_in_training import told
from torch import nn
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAUROC

from sparkdl import TorchEstimator, TorchModel
from sparkdl.callbacks import EarlyStopping
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.checks.preflight import plan_fit

ROWS = 60
THRESHOLDS = 50


def by_scikit_learn(module: nn.Module, ids: np.ndarray) -> dict[str, Any]:
    with torch.no_grad():
        scores = module(torch.tensor(features_of(ids), dtype=torch.float32)).softmax(1).numpy()
    return told(scores, labels_of(ids))


@pytest.mark.nightly
def test_a_fit_measures_each_epoch_and_evaluate_gives_the_same_of_any_partitions(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = frame(spark, ROWS).withColumn("held", F.col("id") % 4 == 0)
    model = estimator(
        metrics=METRICS,
        validationIndicatorCol="held",
        epochs=2,
        timeout=150.0,
        callbacks=[EarlyStopping("auroc", patience=2, restore_best=False)],
    ).fit(rows)
    held = np.arange(0, ROWS, 4)
    assert model.history[-1].metrics == by_scikit_learn(model.module, held)
    some = rows.where("held").repartition(7)
    assert model.evaluate(some, METRICS) == by_scikit_learn(model.module, held)
    model.write().save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"), trust=True)
    assert loaded.history == model.history
    renamed = rows.withColumnRenamed("label", "y")
    everything = by_scikit_learn(model.module, np.arange(ROWS))
    assert loaded.setLabelCol("y").evaluate(renamed, METRICS) == everything
    with pytest.raises(DataError, match="no rows to evaluate"):
        model.evaluate(rows.where("id < 0"), METRICS)
    with pytest.raises(DataError, match="labelCol names the column 'label', which"):
        model.evaluate(renamed, METRICS)


def bytes_to_driver(spark: SparkSession, call: Callable[[], Any]) -> int:
    """What the tasks of all jobs of a call have sent to the driver, as Spark has counted it."""
    context: Any = spark.sparkContext
    group = str(uuid.uuid4())
    context.setJobGroup(group, "measured")
    try:
        call()
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
    context._jsc.sc().listenerBus().waitUntilEmpty()
    tracker, store = context.statusTracker(), context._jsc.sc().statusStore()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    total = 0
    for stage in {stage for job in jobs for stage in job.stageIds}:
        tasks = store.taskList(stage, 0, 1 << 20)
        for task in (tasks.apply(index) for index in range(tasks.size())):
            total += task.taskMetrics().get().resultSize()
    return total


@pytest.mark.nightly
def test_evaluate_brings_states_to_the_driver_and_no_rows(spark: SparkSession) -> None:
    torch.manual_seed(1)
    partitions = 5
    module = nn.Linear(WIDTH, CLASSES)
    model = TorchModel.from_module(module, torch.zeros(1, WIDTH), loss=nn.CrossEntropyLoss())
    few, many = 300, 30_000
    binned = partial(MulticlassAUROC, CLASSES, thresholds=THRESHOLDS)
    of_fixed_size = {**METRICS, "auroc": binned}

    def sent(rows: int, metrics: Any) -> int:
        frames = frame(spark, rows, partitions)
        return bytes_to_driver(spark, lambda: model.evaluate(frames, metrics))

    first, hundredfold = sent(few, of_fixed_size), sent(many, of_fixed_size)
    # A count a hundred times as large takes one byte more at most, however well it is compressed.
    counts = THRESHOLDS * CLASSES * 4 + CLASSES**2 + 2
    assert abs(hundredfold - first) < counts * partitions
    assert hundredfold < many * 4 / 5  # less than the labels alone
    # This one keeps every score and label, which Spark's count has to show.
    every_score = {"auroc": partial(MulticlassAUROC, CLASSES)}
    assert sent(many, every_score) - sent(few, every_score) > many * 4 / 5


class WeightedError(Metric):
    """The weighted mean of absolute errors."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(2), dist_reduce_fx="sum")

    def update(self, predictions: Any, labels: Any, sample_weight: Any) -> None:
        errors = (predictions - labels).abs()
        self.sums += torch.stack([(errors * sample_weight).sum(), sample_weight.sum()])

    def compute(self) -> Any:
        return self.sums[0] / self.sums[1]


@pytest.mark.gate
@pytest.mark.versions
def test_a_model_is_evaluated_on_weighted_rows(spark: SparkSession) -> None:
    torch.manual_seed(4)
    model = TorchModel.from_module(nn.Linear(WIDTH, 1), torch.zeros(1, WIDTH))
    rows = frame(spark).withColumn("label", F.lit(1.0)).withColumn("w", F.col("id") % 7)
    with torch.no_grad():
        found = model.module(torch.tensor(features_of(range(60)), dtype=torch.float32))[:, 0]
    wanted = np.average(np.abs(found.numpy() - 1.0), weights=np.arange(60) % 7)
    metrics = {"error": WeightedError, "mse": MeanSquaredError()}
    measured = model.evaluate(rows, metrics, weightCol="w")
    assert measured["error"] == pytest.approx(wanted, rel=1e-5)
    assert measured["mse"] == model.evaluate(rows, {"mse": MeanSquaredError()})["mse"]
    words = r"weightCol='w' changes nothing: mse count every row equally, because"
    with pytest.raises(ConfigError, match=words):
        model.evaluate(rows, {"mse": MeanSquaredError()}, weightCol="w")


def test_a_fit_says_of_which_metrics_every_row_counts_alike(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"accuracy": METRICS["accuracy"], "weighted": WeightedError}
    plan_fit(estimator(metrics=given, validationFraction=0.3, weightCol="id"), frame(spark, ROWS))
    assert "weightCol='id' weights the losses; the metrics accuracy count every row" in caplog.text


PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


@every_row(
    ({}, "there are none: set metrics"),
    (
        {"metrics": METRICS, "scheduler": PLATEAU},
        "a larger auroc is better, but the scheduler has mode='min'",
    ),
)
def test_what_cannot_be_measured_is_refused_before_training(
    spark: SparkSession, changes: dict[str, Any], words: str
) -> None:
    following = estimator(schedulerMetric="auroc", validationFraction=0.3, **changes)
    with pytest.raises(ConfigError, match=words):
        following.fit(frame(spark))


def test_metrics_are_saved_by_name_where_they_are_made_by_a_class_or_function(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "by-name")
    makers = {"auroc": METRICS["auroc"], "mse": MeanSquaredError}
    estimator(model=_Net, metrics=makers, schedulerMetric="mse").write().save(path)
    with pytest.raises(ConfigError, match="not torch's own"):
        TorchEstimator.load(path, trust=[__name__])
    loaded = TorchEstimator.load(path, trust=[__name__, "torchmetrics"])
    found = loaded.getMetrics() or {}
    assert found["mse"] is MeanSquaredError
    assert (found["auroc"].func, found["auroc"].args) == (MulticlassAUROC, (CLASSES,))
    assert loaded.getSchedulerMetric() == "mse"
    path = str(tmp_path / "pickled")
    estimator(model=_Net, metrics=METRICS).write().save(path)
    with pytest.raises(ConfigError, match="metrics was saved as a pickle"):
        TorchEstimator.load(path, trust=[__name__, "torchmetrics"])


class _Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)
