"""train, evaluate and predict on a table of their own, from the command line to the exit code."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_case import ROWS, configuration, make_table, write_configuration
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession

from sparkdl.errors import DataError, ModelError, SetupError, WorkerLostError
from sparkdl.jobs import command
from sparkdl.jobs.evaluate import main as evaluate
from sparkdl.jobs.exits import Exit, exit_of
from sparkdl.jobs.predict import main as predict
from sparkdl.jobs.train import main as train


@pytest.fixture
def shared_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs use the session of all tests, and leave it and the logging as they were."""
    root, steps = logging.getLogger(), logging.getLogger("sparkdl.jobs.steps")
    before = (root.handlers, root.level, steps.handlers, steps.propagate)
    monkeypatch.setattr(command, "_session", lambda settings: contextlib.nullcontext(spark))
    yield
    root.handlers, root.level, steps.handlers, steps.propagate = before
    logging.captureWarnings(False)


@pytest.fixture
def case(tmp_path: Path) -> dict[str, Any]:
    said = configuration(tmp_path)
    said["baselines"] = {}
    return {"columns": make_table(tmp_path / "table"), "said": said}


@pytest.mark.usefixtures("shared_session")
def test_a_table_is_learnt_from_evaluated_and_predicted_by_one_configuration(
    tmp_path: Path, case: dict[str, Any], capfd: pytest.CaptureFixture[str], spark: SparkSession
) -> None:
    config = ["--config", write_configuration(tmp_path, case["said"])]
    run = [*config, "--run_id", "7", "--log_format", "json"]
    result_file = tmp_path / "xcom" / "return.json"
    assert train([*run, "--result_file", str(result_file)]) == 0
    captured = capfd.readouterr()
    trained = json.loads(captured.out.splitlines()[-1])
    assert trained == json.loads(result_file.read_text())
    assert trained == json.loads((tmp_path / "model" / "_result.json").read_text())
    assert (trained["status"], trained["exit_code"], trained["run_id"]) == ("complete", 0, "7")
    assert [summary["epoch"] for summary in trained["history"]] == [1, 2, 3, 4, 5, 6]
    lines = [json.loads(line) for line in captured.err.splitlines() if line.startswith("{")]
    steps = [line for line in lines if line["logger"] == "sparkdl.jobs.steps"]
    assert [line["context"].get("epoch") for line in steps] == [*"123456", None]
    assert all(line["context"]["run_id"] == "7" for line in lines)

    # Again, and whatever it says of the session: nothing is done.
    assert train([*config, "--run_id", "7", "--session.app_name", "again"]) == 0
    assert "complete for run_id '7' already" in capfd.readouterr().out
    assert isinstance(PipelineModel.load(trained["output"]), PipelineModel)

    assert evaluate([*config, "--run_id", "7"]) == 0
    evaluated = json.loads((tmp_path / "evaluation" / "_result.json").read_text())
    assert predict([*config, "--run_id", "7"]) == 0
    predicted = json.loads((tmp_path / "predictions" / "_result.json").read_text())
    assert predicted["rows"] == ROWS
    rows = spark.read.parquet(str(tmp_path / "predictions")).toPandas().set_index("id").sort_index()
    columns = case["columns"]
    assert list(rows.index) == list(columns["id"])
    assert list(rows["color"]) == list(columns["color"])
    right = rows["prediction"].to_numpy() == columns["label"]
    accuracy = right[columns["part"] == "test"].mean()
    assert accuracy > 0.9
    assert evaluated["metrics"] == {"accuracy": pytest.approx(accuracy)}
    assert trained["metrics"] == {"network": evaluated["metrics"]}
    made = {"model", "evaluation", "predictions", "table", "xcom", "job.yaml"}
    assert {path.name for path in tmp_path.iterdir()} == made


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("x"), 3),
        (ModelError("x"), 4),
        (SetupError("x"), 5),
        (WorkerLostError("x"), 6),
        (OSError("x"), 7),
        (ZeroDivisionError("x"), 1),
        (SystemExit(143), 143),
    ],
)
def test_each_kind_of_error_has_its_code(error: BaseException, code: int) -> None:
    assert exit_of(error) == code
    assert Exit(code).meaning


def test_what_is_no_number_is_null_in_json() -> None:
    said = {"loss": float("nan"), "all": [1.5, float("inf"), {"n": np.inf}]}
    assert command.finite(said) == {"loss": None, "all": [1.5, None, {"n": None}]}
