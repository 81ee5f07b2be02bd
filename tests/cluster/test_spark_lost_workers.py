"""Spark starts lost workers again, and the fit ends as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
from frames import estimator, frame
from models import DiesOnce, Saboteur, lines
from pyspark.sql import SparkSession

from sparkdl import GradientAllReduce, ParameterAveraging
from sparkdl.callbacks import Callback, Training
from sparkdl.errors import ConfigError, TrainingError, WorkerLostError
from sparkdl.strategies import Strategy


@pytest.mark.slow_variants
@pytest.mark.parametrize("executor", [False, True], ids=["process", "executor"])
@pytest.mark.parametrize(
    "strategy",
    [
        ParameterAveraging(),
        pytest.param(GradientAllReduce(commit_every=2), marks=pytest.mark.slow, id="all-reduce"),
        pytest.param(
            ParameterAveraging(2, aggregation="executors"), marks=pytest.mark.slow, id="executors"
        ),
    ],
    ids=["alone", None, None],
)
def test_a_worker_that_is_killed_is_started_again_and_no_row_is_lost(
    spark: SparkSession, tmp_path: Path, strategy: Strategy, executor: bool
) -> None:
    """Alone, or with all others where they need each other; callbacks are told either way."""
    died, told = tmp_path / "died", list[int | None]()

    class Losses(Callback):
        def on_worker_lost(self, training: Training, rank: int | None, why: str) -> None:
            told.append(rank)

    model = DiesOnce(str(died), executor=executor)
    fitted = estimator(
        model=model,
        strategy=strategy,
        numWorkers=3,
        epochs=4,
        batchSize=5,
        timeout=120.0,
        callbacks=[Losses()],
    ).fit(frame(spark, rows=90))
    assert len(lines(died)) == 1
    assert told == [1]
    assert [epoch.examples for epoch in fitted.history] == [90] * 4


@pytest.mark.slow
def test_a_worker_that_dies_again_and_again_ends_the_fit(
    spark: SparkSession, tmp_path: Path
) -> None:
    model = Saboteur(str(tmp_path / "passes"), "die")
    with pytest.raises(TrainingError, match=r"maxFailures allows \(2\): rank 1|failed 4 times"):
        estimator(model=model, numWorkers=3, epochs=9, maxFailures=2).fit(frame(spark, rows=90))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "message"),
    [
        (
            False,
            r"rank 1 on .*Python process ended without an error.*spark.executor.memoryOverhead",
        ),
        (True, r"rank 1 on .*exited with code 137.*killed.*spark.executor.memoryOverhead"),
    ],
    ids=["process", "executor"],
)
def test_who_may_have_been_killed_for_memory_is_told_with_the_setting_to_raise(
    spark: SparkSession, tmp_path: Path, executor: bool, message: str
) -> None:
    model = DiesOnce(str(tmp_path / "died"), executor=executor)
    with pytest.raises(WorkerLostError, match=message):
        estimator(model=model, numWorkers=3, epochs=4, batchSize=5, maxFailures=0).fit(
            frame(spark, rows=90)
        )


def test_more_min_workers_than_workers_are_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="minWorkers is 3, but there are 2 workers"):
        estimator(minWorkers=3, numWorkers=2).fit(frame(spark))
