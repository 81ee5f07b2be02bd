"""Spark starts lost workers again, and the fit ends as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from frames import estimator, frame
from models import DiesOnce, Saboteur, lines
from pyspark.sql import SparkSession

from sparkdl import (
    ColorTrees,
    GossipAveraging,
    GradientAllReduce,
    ParameterAveraging,
    ThresholdGradientSharing,
    TorchModel,
)
from sparkdl.callbacks import Callback, Training
from sparkdl.errors import ConfigError, TrainingError, WorkerLostError
from sparkdl.strategies import Strategy

TREES = GradientAllReduce(commit_every=2, reduction=ColorTrees(2, 0.1))


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


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("strategy", "executor"),
    [
        pytest.param(ParameterAveraging(), False, marks=pytest.mark.versions, id="alone-process"),
        pytest.param(ParameterAveraging(), True, id="alone-executor"),
        pytest.param(GradientAllReduce(commit_every=2), False, id="all-reduce-process"),
        pytest.param(
            GradientAllReduce(commit_every=2),
            True,
            marks=pytest.mark.versions,
            id="all-reduce-executor",
        ),
        pytest.param(ParameterAveraging(2, aggregation="executors"), False, id="executors-process"),
        pytest.param(ParameterAveraging(2, aggregation="executors"), True, id="executors-executor"),
        pytest.param(TREES, False, id="trees-process"),
        pytest.param(TREES, True, id="trees-executor"),
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


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    "strategy",
    [
        ThresholdGradientSharing(0.01, sparsity=(0.05, 0.5)),
        pytest.param(
            ThresholdGradientSharing(0.01, sparsity=(0.05, 0.5), aggregation="executors"),
            marks=pytest.mark.slow,
            id="sharing-among-executors",
        ),
        GossipAveraging(),
    ],
    ids=["sharing", None, "gossip"],
)
def test_sharing_and_gossip_learn_and_survive_a_kill(
    spark: SparkSession, tmp_path: Path, strategy: Strategy
) -> None:
    history = fit_with_a_loss(spark, tmp_path, executor=False, strategy=strategy).history
    assert history[-1].loss < history[0].loss


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
    with pytest.raises(WorkerLostError, match=message):
        fit_with_a_loss(spark, tmp_path, executor, maxFailures=0)


def test_more_min_workers_than_workers_are_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="minWorkers is 3, but this fit has 2 workers"):
        estimator(minWorkers=3, numWorkers=2).fit(frame(spark))
