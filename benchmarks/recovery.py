"""What safety costs: checkpoints and the watchdog, a lost worker, and two that are added.

``epochs``: what checkpoints and the watchdog add to an epoch of a fit on four executors. In every
second epoch the checkpoint of the one before is written and the watchdog is on, so that whatever
else the machine does hits both kinds of epochs alike. Workers keep the thread that would answer the
watchdog in all epochs; it sleeps. ``losses``: four workers, each a process on this machine, train
the network of the other benchmarks on synthetic digits, and one of the four is killed (kill -9)
halfway. The cost is how much longer the job took than without; where the workers need each other
(GradientAllReduce), all start again from the last commit. ``changes``: two workers of a fit become
four after its first epoch (``maxWorkers``); from its end to the first round of the four, beside the
start of a later fit of four.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import digits
import fit_session
import harness
import numpy as np
from harness import Claim
from pyspark.sql import DataFrame, SparkSession

from sparkdl import create_session
from sparkdl.callbacks import Callback, Training
from sparkdl.driver import Launch, Observers, Outcome, RunOptions, run
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.spark.diagnostics.watchdog import watched
from sparkdl.spark.launch.spare_tasks import SpareTasks
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import Shard, batches_of, run_world
from sparkdl.worker import Job

WORKERS = 4
ROWS = 24_000
EPOCHS = 4
PERIOD = 5
BATCH = 16
AVERAGING = ParameterAveraging(PERIOD)
COMMIT_EVERY = 20
COMMITTING = GradientAllReduce(commit_every=COMMIT_EVERY)
RESTART_S = 15.0
"""Seconds that a lost worker may cost besides its own window."""
OPTIMIZER = partial(digits.make_optimizer, lr=0.01)
FIT_BATCH = 8
"""Of the fit with checkpoints: small, for epochs of about a second."""
NEITHER, BOTH = "neither", "a checkpoint and the watchdog"
EPOCHS_OF_A_FIT, WARM_UP = 100, 4


def job(epochs: int, strategy: Strategy[Any] = AVERAGING, batch_size: int = BATCH) -> Job:
    """Returns the training whose workers are lost."""
    return digits.job(
        strategy,
        optimizer=OPTIMIZER,
        epochs=epochs,
        batch_size=batch_size,
        seed=1,
        deadline_s=120.0,
        max_failures=3,
    )


def shards(rows: int) -> list[Shard]:
    generator = np.random.default_rng(0)
    return [
        batches_of(
            500,
            features=generator.normal(size=(rows // WORKERS, 784)).astype(np.float32),
            label=generator.integers(0, 10, rows // WORKERS),
        )
        for _ in range(WORKERS)
    ]


def is_safe(epoch: int) -> bool:
    """Whether an epoch has a checkpoint and the watchdog."""
    return epoch % 2 == 1


def epochs_of_each_kind(epochs: int) -> dict[str, list[float]]:
    """Returns the seconds of the epochs with safety and without, but for the first ones."""
    os.environ.update(harness.child_environment())
    conf = {"spark.executor.memory": "512m"}
    spark = harness.session(f"local-cluster[{WORKERS},1,1024]", conf)
    spark.sparkContext.setLogLevel("OFF")
    switch = _Switch()
    try:
        with tempfile.TemporaryDirectory() as folder:
            digits.write(Path(folder))
            rows = spark.read.parquet(str(Path(folder, "train")))
            estimator = fit_session.estimator(
                optimizer=OPTIMIZER,
                strategy=AVERAGING,
                epochs=epochs,
                batchSize=FIT_BATCH,
                numWorkers=WORKERS,
                checkpointPath=str(Path(folder, "checkpoints")),
                checkpointEvery=2,
            )
            with (
                mock.patch("sparkdl.spark.launch.launcher.watched", switch.watched),
                mock.patch("sparkdl.estimator.checks.row_checks.run", switch.run),
            ):
                history = estimator.fit(rows).history
    finally:
        spark.stop()
    later = history[WARM_UP:]
    return {
        NEITHER: [each.seconds for each in later if not is_safe(each.epoch)],
        BOTH: [each.seconds for each in later if is_safe(each.epoch)],
    }


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
        try:
            yield
        finally:
            self._on.close()

    def run(
        self, job: Job, size: int, launch: Launch, options: RunOptions, observers: Observers
    ) -> Outcome:
        """Replaces ``driver.run``, and switches the watchdog for each epoch that begins."""

        def turn(event: Any) -> None:
            observers.on_event(event)
            if isinstance(event, EpochSummary):
                self._on.close()
                if is_safe(event.epoch + 1):
                    self._on.enter_context(watched(*self._arguments))

        return run(job, size, launch, options, replace(observers, on_event=turn))


def train_seconds(data: list[Shard], strategy: Strategy[Any], *, kill: bool = False) -> float:
    """Seconds from the start to the end of a job, perhaps with a worker killed in the middle."""

    def kill_one(event: object) -> None:
        if kill and isinstance(event, EpochSummary) and event.epoch == EPOCHS // 2:
            victim = min(multiprocessing.active_children(), key=lambda process: process.name)
            threading.Timer(event.seconds / 2, os.kill, [victim.pid, signal.SIGKILL]).start()

    started = time.monotonic()
    outcome = run_world(job(EPOCHS, strategy), data, ranks_as="processes", on_event=kill_one)
    assert all(epoch.examples == ROWS for epoch in outcome.history)
    return time.monotonic() - started


def costs_of_epochs(chosen: argparse.Namespace) -> tuple[list[Claim], dict[str, Any]]:
    """What checkpoints and the watchdog add to an epoch."""
    seconds = epochs_of_each_kind(12 if chosen.quick else EPOCHS_OF_A_FIT)
    medians = harness.show_each(seconds, "an epoch with {}")
    name = f"epoch with {BOTH} / with {NEITHER}"
    claim = harness.claim(name, medians[BOTH], medians[NEITHER], target=1.02)
    return [claim], {"epoch_s": seconds}


def costs_of_losses(chosen: argparse.Namespace) -> tuple[list[Claim], dict[str, Any]]:
    """What a worker that is killed halfway costs."""
    data = shards(ROWS)
    times = harness.interleave(
        {
            "averaging": partial(train_seconds, data, AVERAGING),
            "averaging, one killed": partial(train_seconds, data, AVERAGING, kill=True),
            "all-reduce": partial(train_seconds, data, GradientAllReduce()),
            "all-reduce, commits": partial(train_seconds, data, COMMITTING),
            "all-reduce, commits, one killed": partial(train_seconds, data, COMMITTING, kill=True),
        },
        repeats=chosen.repeats,
    )
    seconds = harness.show_each(times)
    steps = EPOCHS * ROWS / WORKERS / BATCH
    window = seconds["averaging"] / steps * PERIOD
    cost = seconds["averaging, one killed"] - seconds["averaging"]
    repeated = seconds["all-reduce, commits"] / steps * COMMIT_EVERY
    cost_of_all = seconds["all-reduce, commits, one killed"] - seconds["all-reduce, commits"]
    claims = [
        harness.claim(
            "cost of a killed worker / (its window + 15 s)", cost, window + RESTART_S, target=1.0
        ),
        harness.claim(
            "cost of a killed worker of all-reduce / (steps of a commit + 15 s)",
            cost_of_all,
            repeated + RESTART_S,
            target=1.0,
        ),
    ]
    return claims, {
        "seconds": times,
        "window_s": window,
        "cost_s": {"averaging": cost, "all-reduce": cost_of_all},
        "commits / none": seconds["all-reduce, commits"] / seconds["all-reduce"],
    }


class _Rounds(Callback):
    """Notes when rounds are committed; holds the first epoch's end until others can be added."""

    def __init__(self, spares: list[SpareTasks]) -> None:
        self.at: list[tuple[int, float]] = []
        self.ended = 0.0
        self._spares = spares

    def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
        self.at.append((reports[0].epoch, time.monotonic()))

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        if summary.epoch == 1:
            while self._spares and self._spares[-1].free < WORKERS - 2:
                time.sleep(0.01)
            self.ended = time.monotonic()

    def first_of(self, epoch: int) -> float:
        """When the first round of an epoch was committed."""
        return min(at for each, at in self.at if each == epoch)


def starts(
    spark: SparkSession, rows: DataFrame, spares: list[SpareTasks], grows: bool
) -> tuple[float, float]:
    """Seconds until the first round of four workers, two of which may be new; and the last loss."""
    rounds = _Rounds(spares if grows else [])
    number = {"numWorkers": 2, "maxWorkers": WORKERS} if grows else {"numWorkers": WORKERS}
    settings = {"strategy": AVERAGING, "callbacks": [rounds], "epochs": 4, **number}
    estimator = fit_session.estimator(**settings)
    began = time.monotonic()
    history = estimator.fit(rows).history
    assert history[-1].workers == WORKERS
    seconds = rounds.first_of(2) - rounds.ended if grows else rounds.first_of(1) - began
    return seconds, history[-1].loss


def costs_of_changes(chosen: argparse.Namespace) -> tuple[list[Claim], dict[str, Any]]:
    """What it costs that two workers become four."""
    os.environ.update(harness.child_environment())
    conf = {"spark.executor.memory": "512m"}
    master, spares = f"local-cluster[{WORKERS},1,1024]", list[SpareTasks]()

    class Noted(SpareTasks):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            spares.append(self)

    spark = create_session("benchmark", master=master, conf={**harness.CONF, **conf})
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch("sparkdl.estimator.estimator.SpareTasks", Noted),
        ):
            digits.write(Path(folder))
            rows = fit_session.read(spark, Path(folder))
            measure = partial(starts, spark, rows, spares)
            measure(True)  # until then Python starts where workers are added
            found = harness.interleave(
                {
                    "two become four": partial(measure, True),
                    "a later fit of four": partial(measure, False),
                },
                repeats=chosen.repeats,
            )
    finally:
        spark.stop()
    seconds = {name: [each[0] for each in pairs] for name, pairs in found.items()}
    ours, peer = harness.show_each(seconds).values()
    name = "two workers become four, to their first round / a later fit of four"
    losses = {name: [each[1] for each in pairs] for name, pairs in found.items()}
    return [harness.claim(name, ours, peer, target=1.25)], {"s": seconds, "last loss": losses}


def main() -> None:
    parts: dict[str, tuple[harness.Part, int, int]] = {
        "epochs": (costs_of_epochs, 1, 1),
        "losses": (costs_of_losses, 3, 1),
        "changes": (costs_of_changes, 7, 2),
    }
    harness.measure_parts("recovery", harness.parser(__doc__), parts)


if __name__ == "__main__":
    main()
