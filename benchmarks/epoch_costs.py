"""What checkpoints and the watchdog add to an epoch of a fit; part of ``recovery.py``.

One fit on four executors. In every second epoch the checkpoint of the one before is written, and
the watchdog is on in two epochs out of four: so each epoch has neighbours of the three other kinds,
and whatever else the machine does hits all kinds alike. Workers keep the thread that would answer
the watchdog in all epochs; it sleeps.
"""

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import digits
import harness
import torch
from torch import nn

from sparkdl import ParameterAveraging, TorchEstimator
from sparkdl.driver import Launch, Observers, Outcome, RunOptions, run
from sparkdl.events import EpochSummary
from sparkdl.spark.diagnostics.watchdog import watched
from sparkdl.worker import Job

WORKERS = 4
BATCH = 8
"""Small, for epochs of about a second."""
KINDS = {0: "neither", 1: "checkpoint", 2: "watchdog", 3: "both"}
"""By the remainder of an epoch's number divided by four."""


def kind_of(epoch: int) -> str:
    writes, is_watched = epoch % 2 == 1, epoch // 2 % 2 == 1
    return KINDS[writes + 2 * is_watched]


def measure(epochs: int) -> dict[str, list[float]]:
    """Returns the seconds of the epochs of each kind, except the first four.

    Args:
        epochs: a multiple of four.
    """
    os.environ.update(harness.child_environment())
    conf = {"spark.executor.memory": "512m", "spark.ui.enabled": "false"}
    spark = harness.session(f"local-cluster[{WORKERS},1,1024]", conf)
    spark.sparkContext.setLogLevel("OFF")
    switch = _Switch()
    try:
        with tempfile.TemporaryDirectory() as folder:
            digits.write(Path(folder))
            rows = spark.read.parquet(str(Path(folder, "train")))
            estimator = TorchEstimator(
                model=digits.build_mlp,
                loss=nn.CrossEntropyLoss(),
                optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
                strategy=ParameterAveraging(5),
                epochs=epochs,
                batchSize=BATCH,
                numWorkers=WORKERS,
                progress=False,
                checkpointPath=str(Path(folder, "checkpoints")),
                checkpointEvery=2,
            )
            with (
                mock.patch("sparkdl.spark.launch.launcher.watched", switch.watched),
                mock.patch("sparkdl.estimator.estimator.run", switch.run),
            ):
                history = estimator.fit(rows).history
    finally:
        spark.stop()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS.values()}
    for epoch in history[4:]:
        seconds[kind_of(epoch.epoch)].append(epoch.seconds)
    return seconds


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Returns each kind's median relative to that of epochs with neither."""
    plain = statistics.median(seconds["neither"])
    return {kind: statistics.median(values) / plain for kind, values in seconds.items()}


class _Switch:
    """Turns the watchdog of a fit on and off as its epochs end."""

    def __init__(self) -> None:
        self._arguments: Any = ()
        self._on: contextlib.ExitStack = contextlib.ExitStack()

    @contextlib.contextmanager
    def watched(self, *arguments: Any) -> Iterator[None]:
        """Replaces the watchdog, and leaves it on until the first epoch has ended."""
        self._arguments = arguments
        self._on.enter_context(watched(*arguments))
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self._on.close())
            yield

    def run(
        self, job: Job, size: int, launch: Launch, options: RunOptions, observers: Observers
    ) -> Outcome:
        """Replaces ``driver.run``, and switches the watchdog for each epoch that begins."""

        def turn(event: Any) -> None:
            observers.on_event(event)
            if isinstance(event, EpochSummary):
                self._on.close()
                if kind_of(event.epoch + 1) in ("watchdog", "both"):
                    self._on.enter_context(watched(*self._arguments))

        return run(job, size, launch, options, replace(observers, on_event=turn))
