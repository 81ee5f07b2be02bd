"""A worker whose code fails ends the fit and says where; one that is lost is started again."""

from __future__ import annotations

import _thread
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from frames import all_jobs_end, estimator, frame, frame_of_sizes
from models import DiesOnce, Saboteur, lines
from pyspark.sql import DataFrame, SparkSession
from waiting import eventually

from sparkdl import GradientAllReduce, ParameterAveraging, TorchModel
from sparkdl.callbacks import Callback, Training
from sparkdl.errors import (
    DeadlineError,
    TrainingError,
    WorkerError,
    WorkerLostError,
)
from sparkdl.strategies import Strategy

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 90  # three workers of three batches of ten


def sabotage(rows: DataFrame, trace: Path, deed: str, **changes: object) -> None:
    """Fit three workers of which rank 1 misbehaves in its third step."""
    strategy = ParameterAveraging(period=1)
    model = Saboteur(str(trace), deed)
    estimator(model=model, strategy=strategy, numWorkers=3, epochs=2, **changes).fit(rows)


def even(spark: SparkSession) -> DataFrame:
    return frame(spark, rows=ROWS, partitions=3)


def assert_next_fit_works(spark: SparkSession) -> None:
    model = estimator(numWorkers=3).fit(frame(spark))
    assert model.history[0].examples == 60


def test_an_exception_in_forward_fails_the_fit_with_its_place_and_traceback(
    spark: SparkSession, tmp_path: Path
) -> None:
    """That a first attempt found the partitions unequal is no error and nobody's business."""
    trace, rows = tmp_path / "passes", frame_of_sizes(spark, [70, 10, 10])

    with pytest.raises(WorkerError) as caught:
        sabotage(rows, trace, "explode", shuffleRows="spark")

    error = caught.value
    assert "partitions" not in "".join(traceback.format_exception(error))
    assert (error.rank, error.epoch, error.step) == (1, 1, 3)
    assert "rank 1, epoch 1, step 3: ZeroDivisionError: the reactor is empty" in str(error)
    assert "in explode" in error.worker_traceback
    assert error.worker_traceback in str(error)
    first_passes = Counter(line for line in lines(trace) if line.endswith(" 1"))
    assert first_passes == {"0 1": 1, "1 1": 1, "2 1": 1}, "a worker was started again"
    assert all_jobs_end(spark)
    assert_next_fit_works(spark)


@pytest.mark.gate
def test_a_killed_worker_process_ends_the_fit_in_bounded_time_and_names_the_rank(
    spark: SparkSession, tmp_path: Path
) -> None:
    started = time.monotonic()

    said = r"rank 1 on .*Python process ended without an error.*spark.executor.memoryOverhead"
    with pytest.raises(WorkerLostError, match=said):
        sabotage(even(spark), tmp_path / "passes", "die", timeout=120.0, maxFailures=0)

    assert time.monotonic() - started < 90
    assert all_jobs_end(spark)
    assert_next_fit_works(spark)


@pytest.mark.gate
def test_a_worker_that_hangs_ends_the_fit_after_the_timeout_and_is_named(
    spark: SparkSession, tmp_path: Path
) -> None:
    # The timeout also limits the workers' start, and a session's first start is its slowest.
    assert_next_fit_works(spark)
    started = time.monotonic()

    with pytest.raises((DeadlineError, WorkerError), match="rank 1") as caught:
        sabotage(even(spark), tmp_path / "passes", "sleep", timeout=15.0)

    assert "timeout" in str(caught.value)
    assert time.monotonic() - started < 60
    assert all_jobs_end(spark)
    assert_next_fit_works(spark)


@pytest.mark.gate
def test_an_interrupted_fit_leaves_no_job_and_the_session_usable(
    spark: SparkSession, tmp_path: Path
) -> None:
    trace = tmp_path / "passes"

    def interrupt() -> None:
        if eventually(lambda: "1 3" in lines(trace), 60):
            _thread.interrupt_main()

    waiting = threading.Thread(target=interrupt, daemon=True)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        sabotage(even(spark), trace, "sleep", timeout=120.0)
    waiting.join()

    assert all_jobs_end(spark)
    assert_next_fit_works(spark)


def test_a_gpu_that_is_not_there_is_reported_with_the_way_out(spark: SparkSession) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TrainingError, match=r"device='cuda', but torch sees no GPU.*'auto'"):
        estimator(numWorkers=3, device="cuda").fit(frame(spark))


def fit_with_a_loss(
    spark: SparkSession, folder: Path, executor: bool, **changes: Any
) -> TorchModel:
    """Three workers, one of which dies once, alone or with its executor; no row is lost."""
    model = DiesOnce(str(folder / "died"), executor=executor)
    settings = {"numWorkers": 3, "epochs": 4, "batchSize": 5, "timeout": 120.0, **changes}
    fitted = estimator(model=model, **settings).fit(frame(spark, rows=90))
    assert len(lines(folder / "died")) == 1
    assert [epoch.examples for epoch in fitted.history] == [90] * 4
    return fitted


@pytest.mark.nightly_variants
@pytest.mark.parametrize(
    ("strategy", "executor"),
    [
        pytest.param(ParameterAveraging(), False, marks=pytest.mark.versions, id="alone-process"),
        pytest.param(ParameterAveraging(), True, id="alone-executor"),
        pytest.param(
            GradientAllReduce(commit_every=2),
            True,
            marks=pytest.mark.versions,
            id="all-reduce-executor",
        ),
    ],
)
def test_a_worker_that_is_killed_is_started_again_and_no_row_is_lost(
    spark: SparkSession, tmp_path: Path, strategy: Strategy, executor: bool
) -> None:
    """Alone, or with all others where they need each other; callbacks are told either way."""
    told = list[int | None]()

    class Losses(Callback):
        def on_worker_lost(self, training: Training, rank: int | None, why: str) -> None:
            told.append(rank)

    fit_with_a_loss(spark, tmp_path, executor, strategy=strategy, callbacks=[Losses()])
    assert told == [1]


@pytest.mark.gate
def test_who_may_have_been_killed_for_memory_is_told_with_the_setting_to_raise(
    spark: SparkSession, tmp_path: Path
) -> None:
    message = r"rank 1 on .*exited with code 137.*killed.*spark.executor.memoryOverhead"
    with pytest.raises(WorkerLostError, match=message):
        fit_with_a_loss(spark, tmp_path, executor=True, maxFailures=0)
