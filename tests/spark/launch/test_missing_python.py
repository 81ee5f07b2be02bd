"""Executors that find no program where PYSPARK_PYTHON says that Python is."""

from __future__ import annotations

import re

import pytest
from frames import estimator, frame
from pyspark.sql import SparkSession

import sparkdl
from sparkdl import GradientAllReduce
from sparkdl.errors import SetupError

FIXES = {
    "./environment/bin/python": r"spark\.archives .*#environment.*have bin/python\?.*conda-pack",
    "/nowhere/python3": "Install it on every host",
    "no-such-python": "not on the PATH there",
}


def told(path: str) -> str:
    names = rf"cannot start the Python that PYSPARK_PYTHON names, {re.escape(path)}: "
    return rf"{names}No such file or directory\. .*{FIXES[path]}"


@pytest.mark.parametrize("path", FIXES)
def test_a_fit_without_python_on_the_executors_says_where_it_is_sought_and_the_fix(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", path)
    with pytest.raises(SetupError, match=rf"^the executor on \S+ {told(path)}"):
        estimator().fit(frame(spark))


def test_workers_that_start_together_say_it_too(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "./environment/bin/python"
    monkeypatch.setattr(spark.sparkContext, "pythonExec", path)
    with pytest.raises(SetupError, match=told(path)):
        estimator(strategy=GradientAllReduce()).fit(frame(spark))
    with pytest.raises(SetupError, match=told(path)):
        sparkdl.run(lambda: None, num_workers=2)
