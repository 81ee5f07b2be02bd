"""A driver for tests of the cluster: fits one model, and writes down what came out.

    spark-submit train_on_hosts.py OUTPUT [PARAM=VALUE ...]

PARAMs are those of ``frames.estimator``; ``rows`` is the number of rows, and ``sleep`` the seconds
that the model takes for a minibatch, so that there is time for a host to be lost. ``announce`` is
a file to which workers append their rank 4 s before they connect to the driver, and ``allReduce``
makes them reduce gradients. ``noted`` is a file to which the number of workers of each epoch is
appended; with it, the fit ends after the second epoch of three workers that follows one of four.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from frames import estimator, frame
from models import Slow, announced
from pyspark.sql import SparkSession

from sparkdl import GradientAllReduce, TorchModel, create_session
from sparkdl.callbacks import Callback, Training
from sparkdl.events import EpochSummary


class NotesWorkers(Callback):
    """Appends the number of workers of each epoch to a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{summary.workers}\n")
        if [row.workers for row in training.history[-2:]] == [3, 3] and any(
            row.workers == 4 for row in training.history
        ):
            training.stop("hosts have come and gone")


def bits_of_a_fit(spark: SparkSession) -> list[list[float]]:
    """The values of a model that two workers have trained on rows which Spark has shuffled."""
    changes = {"strategy": GradientAllReduce(), "shuffleRows": "spark"}
    return _bits(estimator(**changes).fit(frame(spark)))


def _bits(model: TorchModel) -> list[list[float]]:
    return [tensor.double().flatten().tolist() for tensor in model.module.state_dict().values()]


def main(output: str, *arguments: str) -> None:
    changes: dict[str, Any] = {
        name: json.loads(value) for name, _, value in (a.partition("=") for a in arguments)
    }
    spark = create_session("train on hosts")
    spark.sparkContext.setLogLevel("OFF")
    if sleep := changes.pop("sleep", 0):
        changes["model"] = Slow(sleep)
    if path := changes.pop("announce", None):
        changes["model"] = partial(announced, path, 4.0)
    if changes.pop("allReduce", False):
        changes["strategy"] = GradientAllReduce()
    if path := changes.pop("noted", None):
        changes["callbacks"] = [NotesWorkers(path)]
    workers = changes.setdefault("numWorkers", 2)
    rows = frame(spark, rows=changes.pop("rows", 60), partitions=workers or 2)
    result: dict[str, Any] = {}
    try:
        model = estimator(**changes).fit(rows)
        result["losses"] = [epoch.loss for epoch in model.history]
        result["examples"] = [epoch.examples for epoch in model.history]
        result["rounds"] = [epoch.rounds for epoch in model.history]
        result["workers"] = [epoch.workers for epoch in model.history]
        result["bits"] = _bits(model)
    except Exception as error:  # the tests look at it
        result["error"] = f"{type(error).__name__}: {error}"
    Path(f"{output}.partial").write_text(json.dumps(result))
    os.replace(f"{output}.partial", output)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
