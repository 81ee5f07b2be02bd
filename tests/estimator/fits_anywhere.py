"""Fits that a classic session and a Connect client can both do, and compare."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyspark.ml.feature import IndexToString
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn
from torch.nn.utils import parameters_to_vector
from waiting import eventually

import sparkdl
from sparkdl import (
    GradientAllReduce,
    NearDuplicates,
    ParameterAveraging,
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
)
from sparkdl.callbacks import EarlyStopping, TrainingReport, WorkerCallback, WorkerStep
from sparkdl.errors import SparkDLError
from sparkdl.spark import sending

Survived = dict[str, tuple[list[float], int]]
"""By what was lost: the parameters, and how many steps of the first epoch a survivor has taken."""
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
    """Three workers on rows in five partitions."""
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
    wishes = {"averaging": "exchange", "all-reduce": "spark"}
    given = {
        name: _told(spark, strategy=strategy, shuffleRows=wishes[name])
        for name, strategy in STRATEGIES.items()
    }
    return {**given, "classes": _classified(spark)}


def _told(spark: SparkSession, **changed: Any) -> dict[str, Any]:
    from torchmetrics import MeanSquaredError  # not in every process of a rank

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
    from torchmetrics.classification import MulticlassAccuracy

    frame = _texts(spark)
    model = _classifier(numWorkers=3, shuffleRows="spark").fit(frame)
    model.save(path := tempfile.mkdtemp() + "/model")
    model = TorchClassificationModel.load(path)
    predicted = model.transform(frame).select("prediction", "probability").collect()
    return {
        "values": {name: each.numpy() for name, each in model.module.state_dict().items()},
        "labels": model.getLabels(),
        "predicted": [(row.prediction, row.probability.toArray().tolist()) for row in predicted],
        "measured": model.evaluate(frame, {"accuracy": partial(MulticlassAccuracy, num_classes=2)}),
    }


def _texts(spark: SparkSession) -> DataFrame:
    return rows(spark).withColumn("label", F.expr("IF(label > 0, 'up', 'down')"))


def _classifier(**changed: Any) -> TorchClassifier:
    return TorchClassifier(
        model=partial(nn.Linear, 3, 2),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        epochs=2,
        batchSize=16,
        seed=3,
        progress=False,
        **changed,
    )


def classes(spark: SparkSession) -> tuple[list[str], list[str]]:
    """The columns that a classifier adds, and what the last one's numbers stand for."""
    frame = _texts(spark)
    added = _classifier(numWorkers=1).fit(frame).transform(frame)
    named = IndexToString(inputCol="prediction", outputCol="name").transform(added)
    return added.columns, sorted(row.name for row in named.select("name").distinct().collect())


def refusals(spark: SparkSession) -> dict[str, str]:
    """What is refused before any task starts, and in which words."""
    frame = rows(spark, 30)
    model = TorchModel.from_module(nn.Linear(3, 1), torch.zeros(2, 3))
    tried: dict[str, Callable[[], object]] = {
        "callback": lambda: estimator(callbacks=[TrainingReport("/tmp/report.html")]).fit(frame),
        "workers": lambda: estimator(numWorkers=7).fit(frame),
        "partitions": lambda: estimator(shuffleRows="none").fit(frame),
        "column": lambda: estimator(featuresCol="nothing").fit(frame),
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
    """Kills the process of rank 1, or the one of the averager, in an epoch, once.

    Rank 2 writes down its steps. If there are checkpoints, the first is waited for.
    """

    def __init__(self, lost: str, scratch: Path, checkpoints: Path | None, epoch: int = 2) -> None:
        self.steps, self.flag = scratch / "steps", scratch / "killed"
        self.victim = {"worker": 1, "averager": 0}.get(lost)
        self.checkpoints, self.epoch = checkpoints, epoch

    def after_step(self, step: WorkerStep) -> None:
        if step.rank == 2:
            with self.steps.open("a") as file:
                file.write(f"{step.epoch}")
        if step.rank == self.victim and step.epoch == self.epoch and not self.flag.exists():
            published = self.checkpoints
            assert published is None or eventually(lambda: list(published.glob("checkpoint-*")))
            self.flag.touch()
            # Rank 0 was forked from a child of the process that serves.
            os.kill(os.getpid() if step.rank else _parent_of(os.getppid()), signal.SIGKILL)


def _parent_of(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("PPid:")[2].split()[0])


def survived_without_a_checkpoint(spark: SparkSession, **changed: Any) -> Survived:
    """Fits that lose a worker, or the averager, and one that loses nothing."""
    return _survived(spark, checkpoints=False, **changed)


def survived_with_a_checkpoint(spark: SparkSession, **changed: Any) -> Survived:
    """The same."""
    sending.MOST_IN_A_TASK = 0  # a client sends all as artifacts
    return _survived(spark, checkpoints=True, **changed)


def _survived(spark: SparkSession, *, checkpoints: bool, **changed: Any) -> Survived:
    frame, found = rows(spark), {}
    for lost in ("nothing", "worker", "averager"):
        scratch = Path(tempfile.mkdtemp())
        path = scratch / "checkpoints" if checkpoints else None
        model = estimator(
            callbacks=[Dying(lost, scratch, path)],
            maxFailures=1,
            checkpointPath=None if path is None else str(path),
            **changed,
        ).fit(frame)
        found[lost] = parameters_of(model), (scratch / "steps").read_text().count("1")
    return found


def never_resumed(spark: SparkSession) -> dict[str, Any]:
    """A fit that resumes nothing and loses a worker, beside the checkpoints of an older fit."""
    scratch = Path(tempfile.mkdtemp())
    kept = {"checkpointPath": str(scratch / "checkpoints")}
    estimator(**kept).fit(rows(spark))
    dying = Dying("worker", scratch, None, epoch=1)
    now = {"optimizer": partial(torch.optim.SGD, lr=0.01)}
    never = {**kept, "resume": "never", "maxFailures": 1, "callbacks": [dying]}
    return {
        "lost": parameters_of(estimator(**now, **never).fit(rows(spark))),
        "nothing": parameters_of(estimator(**now).fit(rows(spark))),
        "killed": dying.flag.exists(),
    }


def built_in(process: int) -> nn.Module:
    """A model that is never built in another process."""
    if os.getpid() != process:
        time.sleep(600)
    return nn.Linear(3, 1)


def never_built(spark: SparkSession) -> str:
    """Why a fit has ended whose model is built in the client alone."""
    return _words(
        lambda: estimator(model=partial(built_in, os.getpid()), timeout=20.0).fit(rows(spark))
    )


def parameters_of(model: TorchModel) -> list[float]:
    """All in a row."""
    return parameters_to_vector(model.module.parameters()).tolist()


def parameters(spark: SparkSession) -> list[float]:
    """Those of one fit."""
    return parameters_of(estimator().fit(rows(spark)))


class Begun(WorkerCallback):
    """Says in a file that training has begun."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def after_step(self, step: WorkerStep) -> None:
        Path(self.flag).touch()


def endless(spark: SparkSession) -> None:
    """A fit that somebody has to interrupt; says in the file BEGUN that it has begun."""
    estimator(epochs=1_000_000, callbacks=[Begun(os.environ["BEGUN"])]).fit(rows(spark))
