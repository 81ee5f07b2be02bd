"""Jobs whose rows or evaluators do not fit end in words, and before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyspark
import pytest
from every_row import every
from pyspark.ml import PipelineModel
from pyspark.ml.feature import VectorAssembler
from tables import configuration, make_table, write_configuration

from sparkdl.jobs import evaluate, predict, train
from sparkdl.jobs.evaluate import main as evaluate_main
from sparkdl.jobs.predict import main as predict_main
from sparkdl.jobs.train import main as train_main

pytestmark = pytest.mark.usefixtures("shared_session")


@pytest.fixture
def said(tmp_path: Path) -> dict[str, Any]:
    make_table(tmp_path / "table")
    return {**configuration(tmp_path), "baselines": {}}


class Unchanged:
    """Stands for a saved model."""

    @staticmethod
    def transform(rows: Any) -> Any:
        return rows.selectExpr("*", "double(label) as prediction")


def failed(job: Any, folder: Path, said: dict[str, Any], *more: str) -> tuple[int, str]:
    config = write_configuration(folder, said)
    file = folder / "result.json"
    code = job(["--config", config, "--result_file", str(file), *more])
    return code, json.loads(file.read_text()).get("error", {}).get("message", "")


@pytest.fixture
def nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_score", lambda *_: pytest.fail("a training has begun"))


def test_evaluate_on_no_rows_is_an_error_of_the_data(
    tmp_path: Path, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "load_model", lambda *_: Unchanged)
    code, why = failed(evaluate_main, tmp_path, said, "--rows.test", "part = 'nothing'")
    assert code == 3
    assert "there are 0 rows to evaluate on: rows.test is 'part = 'nothing''" in why
    assert not (tmp_path / "evaluation").exists()


def test_a_column_that_a_stage_misses_is_an_error_of_the_data(
    tmp_path: Path, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = VectorAssembler(inputCols=["no_such"], outputCol="assembled")
    monkeypatch.setattr(evaluate, "load_model", lambda *_: stage)
    code, why = failed(evaluate_main, tmp_path, said)
    assert code == 3
    assert "no_such" in why


@pytest.mark.skipif(pyspark.__version__ < "4", reason="Spark 3.5 tells no SQLSTATE")
@every(
    ("job", "expression", "why"),
    [
        (predict_main, "if(id % 10 = 3, null, x)", "removing nulls from dataset"),
        (predict_main, "x / (id % 10 - 3)", "Division by zero"),
        (train_main, "x / (id % 10 - 3)", "Division by zero"),
    ],
)
def test_a_row_that_spark_cannot_compute_is_an_error_of_the_data(
    tmp_path: Path,
    said: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    job: Any,
    expression: str,
    why: str,
) -> None:
    stages = PipelineModel([VectorAssembler(inputCols=["x"], outputCol="vector"), Unchanged()])
    monkeypatch.setattr(predict, "load_model", lambda *_: stages)
    said["write"] = {}
    said["rows"]["select"] = ["id", "color", "label", "part", f"{expression} AS x"]
    code, told = failed(job, tmp_path, said)
    assert (code, why in told) == (3, True)


@pytest.mark.usefixtures("nothing_is_trained")
@every(
    ("section", "number", "argument", "value"),
    [
        ("evaluators", "accuracy", "metricName", "accurracy"),
        ("baselines", "constant", "maxIter", -1),
        ("stages", 0, "handleInvalid", "never"),
    ],
)
def test_a_wrong_value_of_what_spark_fits_or_measures_with_ends_before_the_training(
    tmp_path: Path, section: str, number: Any, argument: str, value: Any
) -> None:
    make_table(tmp_path / "table")
    said = configuration(tmp_path)
    said[section][number]["init_args"][argument] = value
    code, why = failed(train_main, tmp_path, said)
    place = f"{section}[{number}]" if section == "stages" else f"{section}.{number}"
    assert (code, f"{place}: " in why) == (2, True)
    assert (str(value) if isinstance(value, str) else argument) in why


@every(
    ("job", "arguments", "told"),
    [
        (predict_main, [], (2, "there is no model at ")),
        (evaluate_main, [], (2, "there is no model at ")),
        (train_main, ["--source.init_args.path", "/nowhere"], (3, "/nowhere")),
        (train_main, ["--rows.train", "no_such_column > 1"], (3, "no_such_column")),
        (train_main, ["--rows.test", "part = 'nothing'"], (3, "there are 0 rows to evaluate on")),
    ],
)
@pytest.mark.usefixtures("nothing_is_trained")
def test_what_is_not_there_is_named_by_the_job_that_misses_it(
    tmp_path: Path, said: dict[str, Any], job: Any, arguments: list[str], told: tuple[int, str]
) -> None:
    code, why = failed(job, tmp_path, said, *arguments)
    assert (code, told[1] in why) == (told[0], True)
