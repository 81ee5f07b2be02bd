"""What the user's code does wrong on a worker ends the fit at once and says where it happened."""

from __future__ import annotations

import _thread
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
from frames import estimator, frame, frame_of_sizes
from models import Saboteur, lines
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdl import GradientAllReduce, ParameterAveraging
from sparkdl.errors import DataError, DeadlineError, NonFiniteError, TrainingError, WorkerError
from sparkdl.strategies import Strategy

ROWS = 90  # three workers of three batches of ten


def sabotage(spark: SparkSession, trace: Path, deed: str, **changes: object) -> None:
    """Fit three workers of which rank 1 misbehaves in its third step."""
    strategy = ParameterAveraging(period=1)
    model = Saboteur(str(trace), deed)
    estimator(model=model, strategy=strategy, numWorkers=3, epochs=2, **changes).fit(
        frame(spark, rows=ROWS, partitions=3)
    )


def assert_no_job_runs(spark: SparkSession, within_s: float = 10.0) -> None:
    tracker = spark.sparkContext.statusTracker()
    deadline = time.monotonic() + within_s
    while tracker.getActiveJobsIds() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not tracker.getActiveJobsIds()


def assert_next_fit_works(spark: SparkSession) -> None:
    model = estimator(numWorkers=3).fit(frame(spark))
    assert model.history[0].examples == 60


def test_an_exception_in_forward_fails_the_fit_with_its_place_and_traceback(
    spark: SparkSession, tmp_path: Path
) -> None:
    trace = tmp_path / "passes"

    with pytest.raises(WorkerError) as caught:
        sabotage(spark, trace, "explode")

    error = caught.value
    assert (error.rank, error.epoch, error.step) == (1, 1, 3)
    assert "rank 1, epoch 1, step 3: ZeroDivisionError: the reactor is empty" in str(error)
    assert "in explode" in error.worker_traceback
    assert error.worker_traceback in str(error)
    first_passes = Counter(line for line in lines(trace) if line.endswith(" 1"))
    assert first_passes == {"0 1": 1, "1 1": 1, "2 1": 1}, "a worker was started again"
    assert_no_job_runs(spark)
    assert_next_fit_works(spark)


def test_an_exception_after_the_rows_were_spread_is_all_that_is_shown(
    spark: SparkSession, tmp_path: Path
) -> None:
    """That a first attempt found the partitions unequal is no error and nobody's business."""
    model = Saboteur(str(tmp_path / "passes"), "explode", rank=0, step=1)
    with pytest.raises(WorkerError, match="ZeroDivisionError") as caught:
        estimator(model=model, numWorkers=3).fit(frame_of_sizes(spark, [54, 3, 3]))
    assert "partitions" not in "".join(traceback.format_exception(caught.value))


def test_an_exception_in_the_second_epoch_is_reported_with_that_epoch(
    spark: SparkSession, tmp_path: Path
) -> None:
    model = Saboteur(str(tmp_path / "passes"), "explode", rank=0, step=5)
    with pytest.raises(WorkerError) as caught:
        estimator(model=model, numWorkers=3, epochs=3).fit(frame(spark, rows=ROWS))
    assert (caught.value.rank, caught.value.epoch, caught.value.step) == (0, 2, 5)


def test_an_exception_on_the_only_worker_fails_the_fit(spark: SparkSession, tmp_path: Path) -> None:
    model = Saboteur(str(tmp_path / "passes"), "explode", rank=0)
    with pytest.raises(WorkerError, match="rank 0, epoch 1, step 3: ZeroDivisionError"):
        estimator(model=model, numWorkers=1).fit(frame(spark))


def test_a_builder_that_fails_on_workers_only_is_reported_before_the_first_step(
    spark: SparkSession,
) -> None:
    def build() -> nn.Module:
        from pyspark import TaskContext

        if TaskContext.get() is not None:
            raise OSError("the file with the vocabulary is not here")
        return nn.Linear(4, 3)

    with pytest.raises(WorkerError, match="OSError: the file with the vocabulary") as caught:
        estimator(model=build).fit(frame(spark))
    assert (caught.value.epoch, caught.value.step) == (0, 0)


def test_an_import_that_only_the_driver_has_is_reported_from_the_worker(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Linear(4, 3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'only_here'"):
        estimator(model=only_here.build, shipModules=False).fit(frame(spark))


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    "strategy",
    [
        ParameterAveraging(period=1),
        ParameterAveraging(period=3),
        ParameterAveraging(period=1, aggregation="executors"),
        GradientAllReduce(),
    ],
    ids=str,
)
def test_parameters_that_become_nan_are_an_error_that_names_rank_epoch_and_step(
    spark: SparkSession, tmp_path: Path, strategy: Strategy
) -> None:
    model = Saboteur(str(tmp_path / "passes"), "poison", rank=2, step=3)
    with pytest.raises(NonFiniteError, match=r"rank 2 has \d+ NaN") as caught:
        estimator(model=model, numWorkers=3, strategy=strategy, epochs=2).fit(
            frame(spark, rows=ROWS)
        )
    assert (caught.value.rank, caught.value.epoch, caught.value.step) == (2, 1, 3)


def test_a_loss_that_is_nan_is_an_error_that_names_rank_epoch_and_step(
    spark: SparkSession,
) -> None:
    def nan_on_workers(outputs: Tensor, targets: Tensor) -> Tensor:
        from pyspark import TaskContext

        loss = nn.functional.cross_entropy(outputs, targets)
        return loss if TaskContext.get() is None else loss * float("nan")

    with pytest.raises(NonFiniteError, match="mean loss of the window: nan") as caught:
        estimator(loss=nan_on_workers, strategy=ParameterAveraging(period=1)).fit(frame(spark))
    assert (caught.value.epoch, caught.value.step) == (1, 1)


def frame_with_nan(spark: SparkSession) -> DataFrame:
    spoilt = F.when(F.col("id") == 17, F.array_repeat(F.lit(float("nan")), 4))
    return frame(spark).withColumn("features", spoilt.otherwise(F.col("features")))


def test_nan_in_the_features_is_an_error_before_training(spark: SparkSession) -> None:
    with pytest.raises(DataError, match=r"'features' holds NaN or infinity in 1 of 60 rows"):
        estimator().fit(frame_with_nan(spark))


def test_nan_that_was_to_be_kept_is_an_error_before_a_model_comes_out(spark: SparkSession) -> None:
    with pytest.raises(NonFiniteError, match="bad values in the features"):
        estimator(handleInvalid="keep").fit(frame_with_nan(spark))


def test_a_killed_worker_process_ends_the_fit_in_bounded_time_and_names_the_rank(
    spark: SparkSession, tmp_path: Path
) -> None:
    started = time.monotonic()

    with pytest.raises(TrainingError, match="rank 1"):
        sabotage(spark, tmp_path / "passes", "die", timeout=120.0, maxFailures=0)

    assert time.monotonic() - started < 90
    assert_no_job_runs(spark)
    assert_next_fit_works(spark)


@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_fit_after_the_timeout_and_is_named(
    spark: SparkSession, tmp_path: Path
) -> None:
    # The timeout also limits the workers' start, and a session's first start is its slowest.
    assert_next_fit_works(spark)
    started = time.monotonic()

    with pytest.raises((DeadlineError, WorkerError), match="rank 1") as caught:
        sabotage(spark, tmp_path / "passes", "sleep", timeout=15.0)

    assert "timeout" in str(caught.value)
    assert time.monotonic() - started < 60
    assert_no_job_runs(spark)
    assert_next_fit_works(spark)


@pytest.mark.slow
def test_an_interrupted_fit_leaves_no_job_and_the_session_usable(
    spark: SparkSession, tmp_path: Path
) -> None:
    trace = tmp_path / "passes"

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while "1 3" not in lines(trace) and time.monotonic() < deadline:
            time.sleep(0.05)
        if "1 3" in lines(trace):
            _thread.interrupt_main()

    waiting = threading.Thread(target=interrupt, daemon=True)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        sabotage(spark, trace, "sleep", timeout=120.0)
    waiting.join()

    assert_no_job_runs(spark)
    assert_next_fit_works(spark)


def test_a_gpu_that_is_not_there_is_reported_with_the_way_out(spark: SparkSession) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TrainingError, match=r"device='cuda', but torch sees no GPU.*'auto'"):
        estimator(device="cuda").fit(frame(spark))
