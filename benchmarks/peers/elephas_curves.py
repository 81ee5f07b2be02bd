"""Child process of time_to_accuracy.py that runs in elephas' environment: fits of one session.

Like accuracy_session.py: ``elephas_curves.py DATA PLAN``. In its synchronous mode elephas averages
the replicas' changes once per epoch, and has no other period; the driver takes a snapshot of each
average. The file is read, and the RDD of numpy rows that it wants built, before the clock starts.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import accuracy_curves
import numpy as np
from pyspark import RDD

from peers import elephas_job


def fit(
    rows: RDD[Any], data: Path, snapshots: Path, *, seed: int, epochs: int, learning_rate: float
) -> None:
    """Trains in both executors."""
    with averages_are_taken(snapshots):
        elephas_job.fit(rows, epochs, learning_rate=learning_rate, seed=seed)


@contextmanager
def averages_are_taken(snapshots: Path) -> Iterator[None]:
    """Has elephas take a snapshot of each new average."""
    average = elephas_job.spark_model.average_and_subtract

    def watched(*arguments: Any) -> Any:
        weights = average(*arguments)
        # Keras keeps a layer's matrix as (inputs, outputs).
        accuracy_curves.take(snapshots, (np.asarray(each).T for each in weights))
        return weights

    elephas_job.spark_model.average_and_subtract = watched
    try:
        yield
    finally:
        elephas_job.spark_model.average_and_subtract = average


def main(data: Path, plan: list[dict[str, Any]]) -> None:
    """Fits as the plan says and prints what was measured."""
    spark = elephas_job.session()
    rows = elephas_job.read(spark, data)
    measured = accuracy_curves.fits(partial(fit, rows), data, plan)
    spark.stop()
    print(json.dumps({"fits": measured}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
