"""Executors that Spark reaches, but that cannot reach the port on which the driver averages."""

from __future__ import annotations

import re
from typing import Any

import pytest
from frames import estimator, frame
from pyspark.sql import SparkSession

import sparkdl
from sparkdl import GradientAllReduce, ParameterAveraging
from sparkdl.errors import TrainingError
from sparkdl.transport import local

NOBODY = "127.0.0.77"


@pytest.fixture(autouse=True)
def wrong_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver listens, but tells workers an address at which nobody does."""
    monkeypatch.setattr(local, "HAS_LOCAL_NAMES", False)
    for module in ("estimator.estimator", "spark.functions.run"):
        name = f"sparkdl.{module}.driver_hosts"
        monkeypatch.setattr(name, lambda spark: ("127.0.0.1", NOBODY))


@pytest.mark.parametrize(
    "strategy",
    [
        # Spark starts each task four times before it gives up.
        pytest.param(ParameterAveraging(), marks=pytest.mark.nightly),
        GradientAllReduce(),
    ],
    ids=["averaging", "all-reduce"],
)
def test_the_error_of_a_fit_says_which_address_could_not_be_reached(
    spark: SparkSession, strategy: Any
) -> None:
    address = rf"tcp://{re.escape(NOBODY)}:\d+"
    wanted = rf"^rank \d cannot reach the averager at {address}: .*refused\. .*spark.driver.host"
    with pytest.raises(TrainingError, match=wanted):
        estimator(strategy=strategy).fit(frame(spark))


@pytest.mark.gate
def test_the_error_of_a_run_says_which_address_could_not_be_reached(spark: SparkSession) -> None:
    address = rf"{re.escape(NOBODY)}:\d+"
    wanted = rf"^rank \d cannot reach the driver at {address}: .*refused\. .*spark.driver.host"
    with pytest.raises(TrainingError, match=wanted):
        sparkdl.run(lambda: None, num_workers=2)
