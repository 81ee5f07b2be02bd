"""Fits that a classic session and a Connect client can both do, and compare."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn
from torch.nn.utils import parameters_to_vector
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

import sparkdl
from sparkdl import (
    GradientAllReduce,
    NearDuplicates,
    ParameterAveraging,
    TorchClassifier,
    TorchDistributor,
    TorchEstimator,
    TorchModel,
)
from sparkdl.callbacks import EarlyStopping, TrainingReport, WorkerCallback, WorkerStep
from sparkdl.errors import SparkDLError
from sparkdl.spark.catalyst.jvm import is_of_connect
from sparkdl.spark.closures import sending

STRATEGIES = {"averaging": ParameterAveraging(period=2), "all-reduce": GradientAllReduce()}


class Network(nn.Module):
    """With a buffer, and a word from every worker."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
        self.said = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.said and self.training:
            print("a word from a worker")
            self.said = True
        out: torch.Tensor = self.layers(x)
        return out


def rows(spark: SparkSession, count: int = 300) -> DataFrame:
    """Arrays of three numbers with a label, in five partitions."""
    return spark.range(0, count, 1, 5).selectExpr(
        f"array(id / {count}.0D, sin(id), cos(id)) as features", "2 * sin(id) as label"
    )


def estimator(**changed: Any) -> TorchEstimator:
    """Three workers; Spark's shuffle, which is what Connect uses in any case."""
    return TorchEstimator(
        **{
            "model": Network,
            "loss": nn.MSELoss(),
            "optimizer": partial(torch.optim.Adam, lr=0.01),
            "epochs": 2,
            "batchSize": 16,
            "dropLast": True,
            "numWorkers": 3,
            "seed": 3,
            "shuffleRows": "spark",
            "validationFraction": 0.2,
            "progress": False,
            **changed,
        }
    )


def told(spark: SparkSession) -> dict[str, Any]:
    """All that fits give, as plain values."""
    # A client that wants the workers to exchange their rows gets Spark's shuffle all the same.
    wishes = {"averaging": "exchange" if is_of_connect(spark) else "spark", "all-reduce": "spark"}
    given = {
        name: _told(spark, strategy=strategy, shuffleRows=wishes[name])
        for name, strategy in STRATEGIES.items()
    }
    return {**given, "classes": _classified(spark)}


def _told(spark: SparkSession, **changed: Any) -> dict[str, Any]:
    frame = rows(spark)
    model = estimator(**changed, callbacks=[EarlyStopping(patience=5)]).fit(frame)
    predicted = model.transform(frame).select("prediction").collect()
    summary = model.summary
    return {
        "values": {name: each.numpy() for name, each in model.module.state_dict().items()},
        "history": [(each.epoch, each.loss, each.validation_loss) for each in model.history],
        "counts": (summary.num_workers, summary.rows, summary.held_out_rows, summary.parameters),
        "predicted": [row.prediction for row in predicted],
        "measured": model.evaluate(frame, {"error": MeanSquaredError}),
        "settings": summary.recording.setup.settings["epochs"],
    }


def _classified(spark: SparkSession) -> dict[str, Any]:
    frame = rows(spark).withColumn("label", F.expr("IF(label > 0, 'up', 'down')"))
    model = TorchClassifier(
        model=partial(nn.Linear, 3, 2),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        epochs=2,
        batchSize=16,
        numWorkers=3,
        seed=3,
        shuffleRows="spark",
        progress=False,
    ).fit(frame)
    predicted = model.transform(frame).select("prediction", "probability").collect()
    return {
        "values": {name: each.numpy() for name, each in model.module.state_dict().items()},
        "labels": model.getLabels(),
        "predicted": [(row.prediction, row.probability.toArray().tolist()) for row in predicted],
        "measured": model.evaluate(frame, {"accuracy": partial(MulticlassAccuracy, num_classes=2)}),
    }


def refusals(spark: SparkSession) -> dict[str, str]:
    """What is refused before any task starts, and in which words."""
    frame = rows(spark, 30)
    model = TorchModel.from_module(nn.Linear(3, 1), torch.zeros(2, 3))
    tried: dict[str, Callable[[], object]] = {
        "callback": lambda: estimator(callbacks=[TrainingReport("/tmp/report.html")]).fit(frame),
        "workers": lambda: estimator(numWorkers=7).fit(frame),
        "partitions": lambda: estimator(shuffleRows="none").fit(frame),
        "column": lambda: estimator(featuresCol="nothing").fit(frame),
        "run": lambda: sparkdl.run(len, df=frame),
        "run without rows": lambda: sparkdl.run(len),
        "distributor": lambda: TorchDistributor(2, local_mode=False, use_gpu=False).run(len),
        "udf": model.udf,
        "volume": lambda: model.transform_volume(
            "file:///tmp/in", "file:///tmp/out", patch=(4, 4, 4), overlap=(1, 1, 1)
        ),
        "duplicates": lambda: NearDuplicates(inputCol="label").fit(frame),
        "plan": lambda: sparkdl.plan(estimator(), frame),
        "few": lambda: estimator(shuffleRows="exchange", epochs=1).fit(frame),
        "nothing": lambda: estimator().fit(frame.where("false")),
        "rows": lambda: estimator().fit(
            frame.selectExpr("features", "CAST('NaN' AS DOUBLE) as label")
        ),
    }
    return {name: _words(each) for name, each in tried.items()}


def _words(call: Callable[[], object]) -> str:
    try:
        call()
    except SparkDLError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Dying(WorkerCallback):
    """Kills the process of rank 1 in the second epoch, once."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def after_step(self, step: WorkerStep) -> None:
        if step.rank == 1 and step.epoch == 2 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def survived(spark: SparkSession) -> list[list[float]]:
    """The parameters of a fit that loses a worker, with a checkpoint and without, and of none."""
    sending.MOST_IN_A_TASK = 0  # all is sent as artifacts
    frame, scratch = rows(spark), Path(tempfile.mkdtemp())
    lost = [
        estimator(callbacks=[Dying(scratch / "first")], maxFailures=1),
        estimator(
            callbacks=[Dying(scratch / "second")],
            maxFailures=1,
            checkpointPath=str(scratch / "checkpoints"),
        ),
        estimator(),
    ]
    models = [each.fit(frame) for each in lost]
    return [parameters_to_vector(each.module.parameters()).tolist() for each in models]
