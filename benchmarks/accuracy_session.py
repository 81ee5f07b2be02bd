"""Child process of time_to_accuracy.py: some fits in one fresh Spark session.

``accuracy_session.py CONTENDER DATA PLAN`` prints, as its last line, ``{"fits": [...]}`` as
accuracy_curves.py describes them, and the seconds that the session took to start. No Spark job runs
in it before the first fit.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accuracy_curves
import digits
import prepared
import torch
from accuracy_curves import Fit, take_module
from fit_session import start_session
from peers import averaging_frame, averaging_loop, ddp
from pyspark.sql import DataFrame, SparkSession
from torch import nn


def read(spark: SparkSession, data: Path) -> DataFrame:
    """Returns the training rows; as the schema is given, nothing runs before the clock starts."""
    return spark.read.schema("features array<float>, label long").parquet(str(data / "train"))


def fit_ours(
    strategy: str,
    spark: SparkSession,
    data: Path,
    snapshots: Path,
    *,
    seed: int,
    epochs: int,
    learning_rate: float,
    stream: bool,
    **settings: Any,
) -> None:
    """Fits a TorchEstimator; rank 0 takes a snapshot as each epoch begins, of the one before."""
    import sparkdl
    from sparkdl import TorchEstimator
    from sparkdl.callbacks import WorkerCallback, WorkerStep
    from sparkdl.errors import NonFiniteError

    class Snapshots(WorkerCallback):
        def before_step(self, step: WorkerStep) -> None:
            if step.rank == 0 and step.epoch > 1 and step.step_of_epoch == 1:
                take_module(snapshots, step.model)

    estimator = TorchEstimator(
        model=digits.build_mlp,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(digits.make_optimizer, lr=learning_rate),
        strategy=getattr(sparkdl, strategy)(**settings),
        epochs=epochs,
        batchSize=digits.BATCH_SIZE,
        numWorkers=digits.WORKERS,
        streamFirstEpoch=stream,
        device="cpu",
        seed=seed,
        progress=False,
        callbacks=[Snapshots()],
    )
    try:
        take_module(snapshots, estimator.fit(read(spark, data)).module)
    except NonFiniteError:  # ends the fit; others train on, and are right by chance from then on
        for _ in range(epochs - len(list(snapshots.iterdir()))):
            take_module(snapshots, digits.build_mlp())


def fit_torch_distributor(
    spark: SparkSession, data: Path, snapshots: Path, *, epochs: int, **settings: Any
) -> None:
    """Runs DDP with TorchDistributor; rank 0 takes the snapshots."""
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(digits.WORKERS, local_mode=False, use_gpu=False)
    taking = partial(take_module, snapshots)
    result: Any = distributor.run(ddp.train, data, epochs, on_epoch=taking, **settings)
    if result is None:  # its way to say that a process failed
        raise RuntimeError("TorchDistributor returned nothing: the training failed")


def fit_averaging_loop(spark: SparkSession, data: Path, snapshots: Path, **settings: Any) -> None:
    """Runs the hand-written loop at its best; the driver takes the snapshots."""
    averaging_loop.fit(spark, data, on_epoch=partial(take_module, snapshots), **settings)


def fit_averaging_frame(spark: SparkSession, data: Path, snapshots: Path, **settings: Any) -> None:
    """Runs the hand-written loop on the DataFrame's rows; the driver takes the snapshots."""
    frame = read(spark, data)
    averaging_frame.fit(frame, on_epoch=partial(take_module, snapshots), **settings)


def fit_one_process(
    spark: SparkSession,
    data: Path,
    snapshots: Path,
    *,
    seed: int,
    epochs: int,
    learning_rate: float,
    threads: int,
) -> None:
    """Collects the rows into the driver and trains there with plain torch."""
    table = read(spark, data).toArrow()
    features, labels = digits.tensors(table)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = digits.build_mlp()
    optimizer = digits.make_optimizer(model.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(features)), digits.BATCH_SIZE):
            digits.train_step(model, optimizer, features[batch], labels[batch])
        take_module(snapshots, model)


CONTENDERS: dict[str, Callable[..., None]] = {
    "sparkdl": partial(fit_ours, "ParameterAveraging"),
    "sparkdl_all_reduce": partial(fit_ours, "GradientAllReduce"),
    "torch_distributor": fit_torch_distributor,
    "averaging_loop": fit_averaging_loop,
    "averaging_frame": fit_averaging_frame,
    "one_process": fit_one_process,
}


def main() -> None:
    """Fits as the plan says and prints what was measured."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("contender", choices=CONTENDERS)
    options.add_argument("data", type=Path)
    options.add_argument("plan", type=json.loads)
    options.add_argument("--session", choices=prepared.KINDS, default="plain")
    chosen = options.parse_args()
    started = time.time()
    spark = start_session(chosen.session)
    session = round(time.time() - started, 3)
    fit: Fit = partial(CONTENDERS[chosen.contender], spark)
    measured = accuracy_curves.fits(fit, chosen.data, chosen.plan)
    spark.stop()
    print(json.dumps({"session": session, "fits": measured}), flush=True)


if __name__ == "__main__":
    main()
