"""Child process of time_to_accuracy.py that runs in elephas' environment: fits of one session.

As accuracy_session.py: ``elephas_curves.py DATA PLAN``. In its synchronous mode elephas averages
the replicas' changes once an epoch, by a Spark job each, and the driver takes a snapshot of each
average. In its asynchronous mode one job trains all epochs; each replica asks the driver for the
parameters before an epoch, and sends what it has changed after it. There the first replica takes
what it gets. Reading the file and building the RDD of numpy rows that it wants come before the
clock starts.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported, here and in the executors

import accuracy_curves
import numpy as np
from elephas.parameter import SocketClient  # type: ignore[import-not-found]
from pyspark import RDD, TaskContext

from peers import elephas_job


def fit(
    rows: RDD[Any],
    data: Path,
    snapshots: Path,
    *,
    seed: int,
    epochs: int,
    learning_rate: float,
    mode: str,
) -> None:
    """Trains in both executors, in the ``mode`` ``synchronous`` or ``asynchronous``."""
    train = partial(elephas_job.fit, rows, epochs, learning_rate=learning_rate, seed=seed)
    if mode == "synchronous":
        with averages_are_taken(snapshots):
            train()
    else:
        take(snapshots, train(distribute=partial(asynchronous, snapshots)).get_weights())


def take(snapshots: Path, weights: list[np.ndarray]) -> None:
    """Takes a snapshot of Keras' weights, whose matrices are (inputs, outputs)."""
    accuracy_curves.take(snapshots, (np.asarray(each).T for each in weights))


@contextmanager
def averages_are_taken(snapshots: Path) -> Iterator[None]:
    """Has elephas take a snapshot of each new average."""
    average = elephas_job.spark_model.average_and_subtract

    def watched(*arguments: Any) -> Any:
        weights = average(*arguments)
        take(snapshots, weights)
        return weights

    elephas_job.spark_model.average_and_subtract = watched
    try:
        yield
    finally:
        elephas_job.spark_model.average_and_subtract = average


class WatchedClient(SocketClient):  # type: ignore[misc]
    """Asks for the parameters, and takes those that the first replica gets, but for the initial."""

    def __init__(self, port: int, snapshots: Path) -> None:
        super().__init__(port)
        self._snapshots = snapshots
        self._began = False

    def get_parameters(self) -> list[np.ndarray]:
        weights: list[np.ndarray] = super().get_parameters()
        task = TaskContext.get()
        if task is not None and task.partitionId() == 0:
            if self._began:
                take(self._snapshots, weights)
            self._began = True
        return weights


def asynchronous(snapshots: Path, model: Any) -> Any:
    """Returns elephas' asynchronous face of a model, on a port of its own, without HTTP."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    distributed = elephas_job.spark_model.AsynchronousSparkModel(
        model, parameter_server_mode="socket", port=port
    )
    distributed.client = WatchedClient(port, snapshots)
    return distributed


def main(data: Path, plan: list[dict[str, Any]]) -> None:
    """Fits as the plan says and prints what was measured."""
    spark = elephas_job.session()
    rows = elephas_job.read(spark, data)
    measured = accuracy_curves.fits(partial(fit, rows), data, plan)
    spark.stop()
    print(json.dumps({"fits": measured}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
