"""Executors without Python, with other versions, or from which the driver cannot be reached."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from every_row import every_row
from frames import estimator, frame
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from torchmetrics import MeanSquaredError

import sparkdl
from sparkdl import GradientAllReduce, ParameterAveraging, TorchModel
from sparkdl.errors import SetupError, TrainingError
from sparkdl.spark.launch import environments
from sparkdl.spark.launch.bootstrap import require
from sparkdl.spark.launch.launcher import as_training_error
from sparkdl.transport import local


def told(path: str, fix: str) -> str:
    names = rf"cannot start the Python that PYSPARK_PYTHON names, {re.escape(path)}: "
    return rf"^the executor on \S+ {names}No such file or directory\. .*{fix}"


@pytest.mark.gate
def test_a_fit_without_python_on_the_executors_says_where_it_is_sought_and_the_fix(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "./environment/bin/python"
    words = told(path, r"spark\.archives .*#environment.*have bin/python\?.*conda-pack")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", path)
    with pytest.raises(SetupError, match=words):
        estimator().fit(frame(spark))
    with pytest.raises(SetupError, match=words):  # of workers that start together
        estimator(strategy=GradientAllReduce()).fit(frame(spark))
    with pytest.raises(SetupError, match=words):
        sparkdl.run(lambda: None, num_workers=2)


@every_row(
    ("/nowhere/python3", "Install it on every host"),
    ("no-such-python", "not on the PATH there"),
)
def test_the_fix_depends_on_how_python_is_named(path: str, fix: str) -> None:
    error = environments.setup_error(
        "Lost task 0.0 in stage 1.0 (TID 3) (10.1.2.3 executor 1): java.io.IOException: Cannot run "
        f'program "{path}": error=2, No such file or directory\n'
        "\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)\n"
        "\tat org.apache.spark.api.python.PythonWorkerFactory.startDaemon(Python.scala)"
    )
    assert re.search(told(path, fix), str(error))


def model() -> Any:
    return TorchModel.from_module(torch.nn.Linear(4, 1), torch.zeros(1, 4)).setLabelCol("label")


def metrics() -> dict[str, Any]:
    return {"error": MeanSquaredError()}


@pytest.mark.gate
@pytest.mark.versions
def test_another_minor_version_of_python_is_told_with_the_host(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ".".join(map(str, sys.version_info[:2]))
    rows = frame(spark)
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.9")
    told = (
        rf" runs Python {re.escape(there)}, but the driver Python 3\.9, and .*point PYSPARK_PYTHON "
        r"at a Python 3\.9 there"
    )
    for strategy in (ParameterAveraging(), GradientAllReduce()):
        with pytest.raises(SetupError, match=rf"^the executor on \S+{told}"):
            estimator(strategy=strategy).fit(rows)
    with pytest.raises(SetupError, match=rf"^the executor on \S+{told}"):
        sparkdl.run(lambda: None, num_workers=2)
    with pytest.raises(SetupError, match=rf"^an executor{told}"):  # Spark does not say which
        model().evaluate(rows, metrics())


@pytest.mark.gate
def test_predictions_compare_the_versions_before_they_unpickle_anything(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = frame(spark, rows=4, partitions=1)

    def told(name: str, found: str) -> str:
        return re.escape(f"'{name}' is {found} here but 1.2.3 on the driver (Python ")

    with monkeypatch.context() as changed:
        changed.setattr(environments, "sparkdl_version", lambda: {"sparkdl": "1.2.3"})
        words = told("sparkdl", sparkdl.__version__)
        with pytest.raises(SetupError, match=f"^sparkdl cannot run on this executor: {words}"):
            model().evaluate(rows, metrics())
        with pytest.raises(PySparkException, match=words):
            model().transform(rows).collect()
        with pytest.raises(PySparkException, match=words):
            rows.select(model().udf()("features")).collect()
    with monkeypatch.context() as changed:
        changed.setattr(environments, "torch_version", lambda: {"torch": "1.2.3"})
        with pytest.raises(SetupError, match=told("torch", torch.__version__)):
            model().evaluate(rows, metrics())
    assert model().transform(rows).count() == rows.count()
    assert rows.select(model().udf()("features")).columns == ["predict(features)"]


def test_builds_and_patches_of_torch_may_differ_and_minor_versions_may_not() -> None:
    major, minor, *_ = torch.__version__.split(".")
    require({"torch": f"{major}.{minor}.99+cu126"})
    with pytest.raises(RuntimeError, match=f"'torch' is .* here but {major}\\.1{minor}\\.0 on"):
        require({"torch": f"{major}.1{minor}.0"})
    with pytest.raises(RuntimeError, match=r"'sparkdl' is .* here but 0\.2\.99 on the driver"):
        require({"sparkdl": "0.2.99"})


def test_what_sparks_report_says_of_python_is_read_in_the_words_of_3_5_and_of_4() -> None:
    for colon, there in (("", "(3, 12)"), ("", "3.12"), (":", "3.12")):
        told = environments.setup_error(
            "Lost task 0.0 in stage 1.0 (TID 3) (10.1.2.3 executor 1): PySparkRuntimeError: "
            f"[PYTHON_VERSION_MISMATCH] Python in worker has different version{colon} {there} than "
            f"that in driver{colon} 3.11, PySpark cannot run with different minor versions."
        )
        assert str(told).startswith(
            "the executor on 10.1.2.3 runs Python 3.12, but the driver Python 3.11, and "
        )
    assert environments.setup_error("UNRESOLVED_COLUMN") is None


NOBODY = "127.0.0.77"


@pytest.fixture
def wrong_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver listens, but tells workers an address at which nobody does."""
    monkeypatch.setattr(local, "HAS_LOCAL_NAMES", False)
    for module in ("estimator.estimator", "spark.functions.run"):
        name = f"sparkdl.{module}.driver_hosts"
        monkeypatch.setattr(name, lambda spark: ("127.0.0.1", NOBODY))


def test_a_file_that_a_connect_server_has_lost_is_told_with_the_way_out() -> None:
    said = (
        "Job aborted due to stage failure: Task 1 in stage 6.0 failed 4 times, most recent "
        "failure: Lost task 1.3 in stage 6.0 (TID 14) (10.0.0.2 executor 1): "
        "java.lang.RuntimeException: Stream '/artifacts/37d97b37-113e/files/sparkdl-2daeb1f3' was "
        "not found."
    )
    error = as_training_error(RuntimeError(said))
    assert type(error) is TrainingError
    assert "no longer has a file that a session had sent to it: Stream '/artifacts/37" in str(error)
    assert "Restart the server with spark.sql.artifact.isolation.enabled=true" in str(error)


def test_the_end_of_the_session_is_told_as_such_whatever_spark_raises() -> None:
    class Stopped:
        class sparkContext:
            _jsc = None

    said = "'NoneType' object has no attribute 'setLocalProperty'"
    error = as_training_error(AttributeError(said), spark=Stopped())  # type: ignore[arg-type]
    assert type(error) is TrainingError
    assert str(error).startswith("the Spark session was stopped while its job ran the workers")


@pytest.mark.usefixtures("wrong_address")
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
@pytest.mark.usefixtures("wrong_address")
def test_the_error_of_a_run_says_which_address_could_not_be_reached(spark: SparkSession) -> None:
    address = rf"{re.escape(NOBODY)}:\d+"
    wanted = rf"^rank \d cannot reach the driver at {address}: .*refused\. .*spark.driver.host"
    with pytest.raises(TrainingError, match=wanted):
        sparkdl.run(lambda: None, num_workers=2)
