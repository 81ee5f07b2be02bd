"""The same task with elephas 7.3; runs in elephas' own environment.

``elephas_job.py FOLDER SEED`` prints what fit_session.py prints, and ``elephas_job.py FOLDER PLAN``
what a session of time_to_accuracy.py prints. Keras runs on TensorFlow, which elephas asks for, or
on what ``KERAS_BACKEND`` says. elephas averages the replicas' changes once per epoch, with one
Spark job each, and has no other period in its synchronous mode; for a plan the driver takes a
snapshot of each average. Reading the file and building the RDD of numpy rows that it wants happen
before the clock starts.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accuracy_curves
import digits
import fit_session
import harness
import keras  # type: ignore[import-not-found]
import numpy as np
from elephas import spark_model  # type: ignore[import-not-found]
from elephas.utils.rdd_utils import to_simple_rdd  # type: ignore[import-not-found]
from pyspark import RDD
from pyspark.sql import SparkSession

ONE_THREAD = {
    f"spark.executorEnv.{name}": "1"
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
}


def build_model(learning_rate: float = digits.LEARNING_RATE) -> keras.Model:
    """Returns the compiled MLP 784-256-128-10."""
    model = keras.Sequential(
        [
            keras.Input((digits.PIXELS,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(learning_rate, momentum=digits.MOMENTUM)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    return model


def read(spark: SparkSession, folder: Path) -> RDD[Any]:
    """Returns the training rows as elephas wants them."""
    shards = [digits.read_rows(digits.shard_path(folder, rank)) for rank in range(digits.WORKERS)]
    features = np.concatenate([features.numpy() for features, _ in shards])
    labels = np.concatenate([labels.numpy() for _, labels in shards])
    return to_simple_rdd(spark.sparkContext, features, labels)


def fit(
    rows: RDD[Any], *, epochs: int, learning_rate: float = digits.LEARNING_RATE, seed: int = 7
) -> keras.Model:
    """Trains in both executors; returns the averaged model."""
    keras.utils.set_random_seed(seed)
    distributed = spark_model.SparkModel(build_model(learning_rate))
    options = {"epochs": epochs, "batch_size": digits.BATCH_SIZE, "verbose": 0}
    distributed.fit(rows, validation_split=0.0, **options)
    return distributed.master_network


def accuracy(model: keras.Model, folder: Path) -> float:
    """Returns the fraction of the test rows that the model classifies correctly."""
    features, labels = digits.read_rows(folder / "test.parquet")
    predicted = model.predict(features.numpy(), verbose=0).argmax(axis=1)
    return float((predicted == labels.numpy()).mean())


def fit_and_watch(rows: RDD[Any], data: Path, snapshots: Path, **settings: Any) -> None:
    """Trains in both executors, and takes a snapshot of each new average."""
    average = spark_model.average_and_subtract

    def watched(*arguments: Any) -> Any:
        weights = average(*arguments)
        # Keras keeps a layer's matrix as (inputs, outputs).
        accuracy_curves.take(snapshots, (np.asarray(each).T for each in weights))
        return weights

    with mock.patch.object(spark_model, "average_and_subtract", watched):
        fit(rows, **settings)


def main(folder: Path, given: int | list[dict[str, Any]]) -> None:
    """Fits in one fresh session, twice or as a plan says, and prints what was measured."""
    started = time.time()
    spark = harness.session(conf=ONE_THREAD)
    started_in = time.time() - started
    rows = read(spark, folder)
    if isinstance(given, int):
        fits = fit_session.two_fits(
            lambda seed: (fit(rows, seed=seed, epochs=digits.EPOCHS), None),
            partial(accuracy, folder=folder),
            given,
        )
    else:
        fits = accuracy_curves.fits(partial(fit_and_watch, rows), folder, given)
    spark.stop()
    print(json.dumps({"session": round(started_in, 3), "fits": fits}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
