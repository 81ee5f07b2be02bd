"""Sharing gradients, and gossip, on real executors."""

from __future__ import annotations

from pathlib import Path

import pytest
from frames import estimator, frame
from models import DiesOnce, lines
from pyspark.sql import SparkSession

from sparkdl import GossipAveraging, ThresholdGradientSharing
from sparkdl.strategies import Strategy


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
def test_it_learns_counts_every_row_once_and_survives_a_kill(
    spark: SparkSession, tmp_path: Path, strategy: Strategy
) -> None:
    died = tmp_path / "died"
    model = DiesOnce(str(died), executor=False)
    fitted = estimator(
        model=model, strategy=strategy, numWorkers=3, epochs=4, batchSize=5, timeout=120.0
    ).fit(frame(spark, rows=90))
    assert len(lines(died)) == 1
    assert [epoch.examples for epoch in fitted.history] == [90] * 4
    assert fitted.history[-1].loss < fitted.history[0].loss
