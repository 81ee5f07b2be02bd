"""Kinds of session, for ours and peers alike; and a child of startup.py, which fits twice in one.

``plain`` is built by the user; ``created`` comes from ``sparkdl.create_session``; ``connect`` is a
client of Spark Connect.

The child prints, as its last line, ``{"session": ..., "fits": [{"seconds": ..., "first_step": ...,
"accuracy": ...}, ...]}``: the seconds that the session took to start; of each fit the wall time of
the call, the time from the call to the first optimizer step (null if not observed), and the
accuracy on the test rows. No Spark job runs in a session before its first fit. ``create_session``
imports torch's compiler while Java starts: its time is part of the session's, not of the fit's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import digits
import harness
import torch
from peers import averaging_loop, ddp
from pyspark.sql import DataFrame, SparkSession
from torch import nn

if TYPE_CHECKING:  # elephas' environment has no sparkdl
    from sparkdl import TorchEstimator

PERIOD = 5
"""Of ours, which is its default, and of a loop by hand; another loop has a round an epoch."""

KINDS = ("plain", "created", "connect")


class StampedSGD(torch.optim.SGD):
    """SGD that records when its first step ended, in a file of its own below ``stamps``."""

    def __init__(self, parameters: Any, *, stamps: Path, **options: Any) -> None:
        super().__init__(parameters, **options)
        self._stamps: Path | None = stamps

    def step(self, closure: Any = None) -> Any:
        """Takes one step, as SGD does."""
        result = super().step(closure)
        if self._stamps is not None:
            stamp = self._stamps / f"{os.getpid()}-{time.time_ns()}"
            stamp.write_text(repr(time.time()))
            self._stamps = None
        return result


def first_step_of_all(stamps: Path) -> float:
    """Returns when the last worker took its first step on rows, as seconds since the epoch.

    A process may have tried out an optimizer before, to see what state it has; the driver did only
    that, and so did the process beside rank 0 in which a run of Spark Connect is served.
    """
    steps: dict[str, float] = {}
    for stamp in stamps.iterdir():
        process = stamp.name.split("-")[0]
        steps[process] = max(steps.get(process, 0.0), float(stamp.read_text()))
    steps.pop(str(os.getpid()), None)
    if len(steps) < digits.WORKERS:
        raise RuntimeError(f"{len(steps)} workers noted first steps, not {digits.WORKERS}")
    return max(steps.values())


def start_session(kind: str, conf: Mapping[str, str] = harness.CONF) -> SparkSession:
    """Returns a session of a kind of ``KINDS``, with the same settings whatever it is."""
    if kind != "created":
        return harness.session(conf=conf, connect=kind == "connect")
    from sparkdl import create_session

    return create_session("benchmark", master=harness.MASTER, conf={**harness.CONF, **conf})


def read(spark: SparkSession, folder: Path) -> DataFrame:
    """Returns the training rows; as the schema is given, nothing runs before the clock starts."""
    return spark.read.schema("features array<float>, label long").parquet(str(folder / "train"))


def estimator(**settings: Any) -> TorchEstimator:
    """Returns one for the task by default, with settings where they are to differ."""
    from sparkdl import TorchEstimator

    usual: dict[str, Any] = {
        "model": digits.build_mlp,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": digits.make_optimizer,
        "batchSize": digits.BATCH_SIZE,
        "numWorkers": digits.WORKERS,
        "device": "cpu",
        "progress": False,
    }
    return TorchEstimator(**(usual | settings))


def fit_ours(
    strategy: str, spark: SparkSession, folder: Path, epochs: int, seed: int
) -> tuple[nn.Module, float | None]:
    """Fits a TorchEstimator on the Parquet files; returns the model and the first step's time."""
    from sparkdl import GradientAllReduce, ParameterAveraging

    frame = read(spark, folder)
    with tempfile.TemporaryDirectory() as stamps:
        model = estimator(
            optimizer=partial(StampedSGD, stamps=Path(stamps), **digits.make_optimizer.keywords),
            strategy=ParameterAveraging(PERIOD) if strategy == "averaging" else GradientAllReduce(),
            epochs=epochs,
            seed=seed,
        ).fit(frame)
        return model.module, first_step_of_all(Path(stamps))


def distributed(function: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    """Has TorchDistributor call a function; returns what its rank 0 does."""
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(digits.WORKERS, local_mode=False, use_gpu=False)
    result = distributor.run(function, *given, **settings)
    if result is None:  # its way to say that a process failed
        raise RuntimeError("TorchDistributor returned nothing: the function failed")
    return result


def fit_torch_distributor(
    spark: SparkSession, folder: Path, epochs: int, seed: int
) -> tuple[nn.Module, float | None]:
    """Runs DDP with TorchDistributor; returns the model and the first step's time."""
    result = distributed(ddp.train, folder, epochs, seed=seed)
    model = digits.build_mlp()
    model.load_state_dict(
        {name: torch.from_numpy(value) for name, value in result["state"].items()}
    )
    return model, result["first_step"]


def fit_averaging_loop(
    period: int, spark: SparkSession, folder: Path, epochs: int, seed: int
) -> tuple[nn.Module, float | None]:
    """Runs the hand-written loop; returns the model. Its first step is not observed."""
    return averaging_loop.fit(spark, folder, epochs=epochs, period=period, seed=seed), None


Fit = Callable[[SparkSession, Path, int, int], tuple[nn.Module, float | None]]
CONTENDERS: dict[str, Fit] = {
    "sparkdl": partial(fit_ours, "averaging"),
    "sparkdl_all_reduce": partial(fit_ours, "all-reduce"),
    "torch_distributor": fit_torch_distributor,
    "averaging_loop": partial(fit_averaging_loop, PERIOD),
    "averaging_loop_each_epoch": partial(fit_averaging_loop, digits.STEPS),
}


def elephas(folder: Path, given: str, backend: str, **options: Any) -> dict[str, Any]:
    """Returns what ``elephas_job.py`` prints, in its own environment; see there."""
    python = harness.peer_python("elephas")
    return harness.run_child(
        [python, harness.FOLDER / "peers" / "elephas_job.py", folder, given],
        environment=harness.child_environment(python) | {"KERAS_BACKEND": backend},
        **options,
    )


def twice(contender: str, folder: str, kind: str, seed: int) -> dict[str, Any]:
    """Fits twice with one contender; returns what it measured."""
    started = time.time()
    spark = start_session(kind)
    session = time.time() - started
    fit = partial(CONTENDERS[contender], spark, Path(folder), digits.EPOCHS)
    fits = two_fits(fit, partial(digits.accuracy, folder=Path(folder)), seed)
    spark.stop()
    return {"session": round(session, 3), "fits": fits}


def two_fits(
    fit: Callable[[int], tuple[Any, float | None]], accuracy: Callable[[Any], float], seed: int
) -> list[dict[str, Any]]:
    """Fits twice, with a seed and the next one; returns what was measured."""
    fits = []
    for number in range(2):
        called = time.time()
        model, first_step = fit(seed + number)
        seconds = time.time() - called
        fits.append(
            {
                "seconds": round(seconds, 3),
                "first_step": None if first_step is None else round(first_step - called, 3),
                "accuracy": round(accuracy(model), 4),
            }
        )
    return fits


if __name__ == "__main__":
    harness.parse(harness.parser(__doc__), child=twice)
