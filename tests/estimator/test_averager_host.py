"""``averagerHost="executor"``: fits whose averager runs beside rank 0, and in the driver."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import fits_anywhere
import pytest
import torch
from fits_anywhere import Begun, parameters_of
from frames import CLASSES, WIDTH, all_jobs_end, estimator, frame, in_files, no_jobs, same_bits
from pyspark import InheritableThread, TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn
from waiting import eventually

import sparkdl
from sparkdl import GradientAllReduce, ParameterAveraging
from sparkdl.callbacks import TrainingReport, WorkerCallback, WorkerStep
from sparkdl.errors import (
    ConfigError,
    ModelError,
    SparkDLError,
    TrainingError,
    WorkerLostError,
)
from sparkdl.spark.launch import assignment

cloudpickle.register_pickle_by_value(sys.modules[__name__])
BESIDE = {"averagerHost": "executor"}


def refused(*_: object) -> None:
    raise AssertionError("a fit that is served beside rank 0 opened a port of the driver")


# Of torch's own layers, with a buffer and dropout.
LAYERS = nn.Sequential(
    nn.Unflatten(1, (1, WIDTH)),
    nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=8, batch_first=True),
    nn.Flatten(),
    nn.BatchNorm1d(WIDTH),
    nn.Linear(WIDTH, CLASSES),
)


@pytest.mark.versions
def test_the_driver_opens_no_port_and_gets_the_bits_of_its_own_averager(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = frame(spark, 90, 5)
    of_layers = {"model": LAYERS, "strategy": GradientAllReduce(), "validationFraction": 0.2}
    for changes in ({"shuffleRows": "spark"}, of_layers):
        wanted = estimator(**changes).fit(rows)
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "listen", refused)
            found = estimator(**changes, **BESIDE).fit(rows)
        assert same_bits(found, wanted), changes
        for losses in ("loss", "validation_loss"):
            assert [getattr(each, losses) for each in found.history] == [
                getattr(each, losses) for each in wanted.history
            ]
        assert found.summary.rows + found.summary.held_out_rows == 90
        assert found.summary.num_workers == 2


def test_what_an_executor_cannot_serve_is_refused_or_said_before_any_task(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = frame(spark)
    with no_jobs(spark):
        with pytest.raises(ConfigError, match=r"averagerHost must be one of .*'rank0'"):
            estimator(averagerHost="rank0")
        report = TrainingReport("/tmp/report.html")
        with pytest.raises(ConfigError, match=r"TrainingReport runs in the driver .*'driver'"):
            estimator(callbacks=[report], minWorkers=2, **BESIDE).fit(rows)
        with pytest.raises(ConfigError, match=r"has 3 for 2 tasks"):
            estimator(shuffleRows="none", **BESIDE).fit(rows)
        with pytest.raises(ConfigError, match=r"served in the driver, but averagerHost is"):
            sparkdl.plan(estimator(**BESIDE), rows)
        for name, value, wanted in (
            (
                "dynamicAllocation.enabled",
                "true",
                r"'executor' needs .* \(spark.exec.*\)$",
            ),
            ("driver.maxResultSize", "200b", r"With averagerHost='executor' they .* allows 0 MB"),
        ):
            conf = spark.sparkContext.getConf().set(f"spark.{name}", value)
            with monkeypatch.context() as patch:
                patch.setattr(spark.sparkContext, "getConf", lambda conf=conf: conf)
                with pytest.raises(ConfigError, match=wanted):
                    estimator(strategy=ParameterAveraging(), **BESIDE).fit(rows)
    assert "minWorkers=2 has no effect" not in caplog.text  # nothing was fitted
    estimator(minWorkers=2, **BESIDE).fit(rows)
    assert "minWorkers=2 has no effect with averagerHost='executor'" in caplog.text


@pytest.mark.nightly
def test_errors_are_told_as_the_driver_tells_them(spark: SparkSession, tmp_path: Path) -> None:
    """Also in which of the partitions that Spark has read a bad row is."""
    bad = frame(spark, 90, 5).withColumn(
        "features", F.expr("transform(features, x -> IF(id = 77, double('nan'), x))")
    )
    tried: dict[str, tuple[DataFrame, dict[str, Any]]] = {
        "a bad row in files": (in_files(bad, tmp_path / "bad"), {}),
        "a bad row that Spark moved": (bad, {}),
        "a bad row that Spark shuffled": (bad, {"shuffleRows": "spark"}),
    }
    for name, (rows, changes) in tried.items():
        told = []
        for where in ({}, BESIDE):
            with pytest.raises(SparkDLError) as caught:
                # Whose rows take the same way, wherever the averager runs.
                estimator(strategy=GradientAllReduce(), **changes, **where).fit(rows)
            message = str(caught.value)
            if "that Spark" in name:  # the order in which its rows arrive varies
                message = re.sub(r"row \d+ of", "row of", message)
            told.append(f"{type(caught.value).__name__}: {message}")
        assert told[0] == told[1], name


@pytest.mark.nightly
def test_a_lost_worker_is_said_with_how_its_process_ended(
    spark: SparkSession, tmp_path: Path
) -> None:
    dying = fits_anywhere.Dying("worker", tmp_path, None)
    with pytest.raises(WorkerLostError, match=r"rank 1 on .* was ended by SIGKILL.*raise spark"):
        fits_anywhere.estimator(callbacks=[dying], maxFailures=0, **BESIDE).fit(
            fits_anywhere.rows(spark)
        )


@pytest.mark.gate
def test_all_start_again_when_a_worker_or_the_averager_is_lost(spark: SparkSession) -> None:
    found = fits_anywhere.survived_without_a_checkpoint(spark, **BESIDE)
    values, steps = found["nothing"]
    assert found == dict.fromkeys(found, (values, 2 * steps)) | {"nothing": (values, steps)}


@pytest.mark.gate
def test_resume_never_continues_no_older_fit_after_a_loss(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows, kept = fits_anywhere.rows(spark), {"checkpointPath": str(tmp_path / "checkpoints")}
    fits_anywhere.estimator(**kept).fit(rows)
    dying = fits_anywhere.Dying("worker", tmp_path, None, epoch=1)
    now = {"optimizer": partial(torch.optim.SGD, lr=0.01)}
    never = {**kept, "resume": "never", "maxFailures": 1, "callbacks": [dying]}
    found = fits_anywhere.estimator(**now, **never, **BESIDE).fit(rows)
    assert dying.flag.exists()
    assert parameters_of(found) == parameters_of(fits_anywhere.estimator(**now).fit(rows))


class Stuck(WorkerCallback):
    """Rank 1 holds Python's lock, so that not even its heartbeats go on."""

    def after_step(self, step: WorkerStep) -> None:
        if step.rank == 1:
            ctypes.PyDLL(None).sleep(600)


@pytest.mark.nightly
def test_a_worker_that_is_stuck_is_named_and_its_task_ended(spark: SparkSession) -> None:
    with pytest.raises(TrainingError, match="rank 1"):
        estimator(callbacks=[Stuck()], timeout=20.0, maxFailures=0, **BESIDE).fit(frame(spark))
    assert all_jobs_end(spark, 60)


def builder_that_hangs() -> nn.Module:
    if TaskContext.get() is not None:
        time.sleep(600)
    return nn.Linear(WIDTH, CLASSES)


@pytest.mark.gate
def test_a_model_that_is_never_built_on_the_first_executor_ends_the_fit(
    spark: SparkSession,
) -> None:
    with pytest.raises(ModelError, match=r"first task, on .* within 20 s: .*'timeout'") as found:
        estimator(model=builder_that_hangs, timeout=20.0, **BESIDE).fit(frame(spark))
    assert "in builder_that_hangs" in str(found.value)
    assert all_jobs_end(spark, 60)


class Staying(WorkerCallback):
    """Rank 1 does not end, although it has left the run."""

    def after_step(self, step: WorkerStep) -> None:
        if step.rank == 1:
            assignment.added_here = partial(time.sleep, 600)  # type: ignore[assignment]


@pytest.mark.gate
@pytest.mark.timeout(150)
def test_a_worker_that_stays_after_the_training_does_not_keep_the_model_from_the_driver(
    spark: SparkSession,
) -> None:
    wanted = estimator().fit(frame(spark))
    assert same_bits(estimator(callbacks=[Staying()], **BESIDE).fit(frame(spark)), wanted)
    assert all_jobs_end(spark, 60)


@pytest.mark.nightly
def test_an_interrupt_or_a_cancelled_job_group_ends_the_stage(
    spark: SparkSession, tmp_path: Path
) -> None:
    context = spark.sparkContext

    def end(begun: Path, by: str) -> None:
        assert eventually(begun.exists, 120)
        if by == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            context.cancelJobGroup("a cell")

    for by, raised in {"interrupt": KeyboardInterrupt, "group": TrainingError}.items():
        begun = tmp_path / by
        ending = InheritableThread(target=end, args=(begun, by))
        context.setJobGroup("a cell", "what the user waits for")
        try:
            ending.start()
            with pytest.raises(raised):
                estimator(epochs=1_000_000, callbacks=[Begun(str(begun))], **BESIDE).fit(
                    frame(spark)
                )
        finally:
            context.setLocalProperty("spark.jobGroup.id", None)
            ending.join()
        assert all_jobs_end(spark, 60)
    assert parameters_of(estimator(**BESIDE).fit(frame(spark)))
