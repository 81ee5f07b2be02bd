"""train, evaluate and predict on a table of their own, from the command line to the exit code."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyspark
import pytest
from every_row import every
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession
from tables import ROWS, configuration, make_table, write_configuration

from sparkdl.callbacks import Training
from sparkdl.durable import lease
from sparkdl.durable.local_files import LocalFiles
from sparkdl.errors import (
    ConfigError,
    DataError,
    InUseError,
    ModelError,
    SetupError,
    WorkerLostError,
)
from sparkdl.events import EpochSummary
from sparkdl.feed.shards import DataStatistics
from sparkdl.jobs import command, logs
from sparkdl.jobs.command import locate
from sparkdl.jobs.evaluate import Score, format_scores
from sparkdl.jobs.evaluate import main as evaluate
from sparkdl.jobs.grammar import read_settings
from sparkdl.jobs.output import MARKER, Location, Output, Run
from sparkdl.jobs.predict import main as predict
from sparkdl.jobs.result import Exit, exit_of
from sparkdl.jobs.train import _estimator
from sparkdl.jobs.train import main as train
from sparkdl.planner.profile import Profile
from sparkdl.spark.files import open_hadoop


@pytest.fixture
def case(tmp_path: Path) -> dict[str, Any]:
    said = configuration(tmp_path)
    said["baselines"] = {}
    return {"columns": make_table(tmp_path / "table"), "said": said}


@pytest.mark.usefixtures("shared_session")
@pytest.mark.versions
@pytest.mark.gate
def test_a_table_is_learnt_from_evaluated_and_predicted_by_one_configuration(
    tmp_path: Path, case: dict[str, Any], capfd: pytest.CaptureFixture[str], spark: SparkSession
) -> None:
    case["said"]["baselines"] = {"logistic": "pyspark.ml.classification.LogisticRegression"}
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
    assert Profile.from_json(result_file.read_text()).workers == 2
    lines = [json.loads(line) for line in captured.err.splitlines() if line.startswith("{")]
    steps = [line for line in lines if line["logger"] == "sparkdl.jobs.steps"]
    assert [line["context"].get("epoch") for line in steps] == [None, *"123456", None]
    assert all(line["context"]["run_id"] == "7" for line in lines)

    # Again, and whatever it says of the session: nothing is done.
    assert train([*config, "--run_id", "7", "--session.app_name", "again"]) == 0
    assert "already complete for run_id '7'" in capfd.readouterr().out
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
    assert trained["metrics"]["network"] == evaluated["metrics"]
    assert trained["metrics"]["logistic"]["accuracy"] > 0.9  # after the same stages
    made = {"model", "evaluation", "predictions", "table", "xcom", "job.yaml"}
    assert {path.name for path in tmp_path.iterdir()} == made


@pytest.mark.parametrize("renames", [True, False])
def test_hadoops_file_systems_publish_with_renames_or_a_marker(
    tmp_path: Path, spark: SparkSession, renames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRES_S", 0.1)
    files, root = open_hadoop(f"file://{tmp_path}/a/out")
    place = Location(files=files, path=root, renames=renames)
    runs = (Run(job="train", run_id=run_id, configuration_sha256="c") for run_id in "abb")
    assert [make_output(place, run) for run in runs] == [True, True, False]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]
    assert json.loads((tmp_path / "a" / "out" / "_result.json").read_text())["run_id"] == "b"
    assert (tmp_path / "a" / "out" / "deep" / "file").read_text() == "b"
    assert locate(f"file://{tmp_path}/a/out/").path == f"{tmp_path}/a/out"
    with pytest.raises(ConfigError, match="root of a file system"):
        locate("file:///")
    with pytest.raises(ConfigError, match="'nosuch://x/y' cannot be reached"):
        locate("nosuch://x/y")


def make_output(place: Location, run: Run) -> bool:
    """Whether there was something to make."""
    output = Output(place, run)
    with output.claimed() as done:
        if done is None:
            place.files.create_dir(f"{output.staged}/deep", recursive=True)
            with place.files.open_output_stream(f"{output.staged}/deep/file") as file:
                file.write(str(run.run_id).encode())
            output.commit({"status": "complete"})
    return done is None


@every(
    ("error", "code"),
    [
        *((DataError("x"), 3), (ModelError("x"), 4), (SetupError("x"), 5)),
        *((WorkerLostError("x"), 6), (OSError("x"), 7), (ZeroDivisionError("x"), 1)),
        *((InUseError("x", "y"), 75), (SystemExit(143), 143)),
    ],
)
def test_each_kind_of_error_has_its_code(error: BaseException, code: int) -> None:
    assert exit_of(error) == code
    assert Exit(code).meaning


def test_an_ended_job_leaves_its_meaning_and_no_second_message(
    tmp_path: Path,
    case: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends(*_: object) -> None:
        sys.exit(143)  # as the fit does, which has said why

    monkeypatch.setattr(command, "_run", ends)
    file = tmp_path / "result.json"
    config = write_configuration(tmp_path, case["said"])
    assert train(["--config", config, "--result_file", str(file)]) == 143
    assert json.loads(file.read_text())["error"]["message"] == Exit.TERMINATED.meaning
    assert caplog.text == ""


def test_a_person_sees_that_a_training_resumes_and_each_epoch_without_a_progress_bar(
    tmp_path: Path, case: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_configuration(tmp_path, case["said"])
    for progress, shown in (("false", 1), ("true", 0)):
        arguments = ["--config", config, "--estimator.progress", progress]
        settings = read_settings("train", arguments)
        context: Any = SimpleNamespace(settings=settings, checkpoints=None)
        (lines,) = _estimator(context).getCallbacks()
        logs.configure("text", None, {})
        ended = EpochSummary(epoch=2, loss=0.25, examples=400, rounds=3, seconds=1.5)
        training = Training(6, history=[ended], resumed=True, step=20)
        lines.on_start(training, DataStatistics((400,), ()))
        lines.on_epoch(training, ended)
        told = "resumed from a checkpoint: 1 of 6 epochs done, step 20\n"
        assert capsys.readouterr().out == told + "[  1.5 s] epoch 2 of 6: loss 0.2500\n" * shown


def test_what_is_no_number_is_null_in_json() -> None:
    said = {"loss": float("nan"), "all": [1.5, float("inf"), {"n": np.inf}]}
    assert command.finite(said) == {"loss": None, "all": [1.5, None, {"n": None}]}


def test_nothing_that_a_job_says_or_writes_shows_credentials(
    tmp_path: Path,
    case: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = "s3a://KEY:SECRET@bucket/out"
    session = SimpleNamespace(sparkContext=SimpleNamespace(applicationId="app"))
    monkeypatch.setattr(command, "_session", lambda _: contextlib.nullcontext(session))
    config = write_configuration(tmp_path, {**case["said"], "model": place})

    def work(context: command.JobContext) -> command.JobOutput:
        logs.say(f"evaluated {place}", rows=3)
        logging.getLogger("sparkdl.jobs.output").warning("%s was left by another run", place)
        saved = f"Predictions saved in {context.settings.output}"
        return command.JobOutput({"model": place, "all": [{"uri": f"{place}?sig=SECRET"}]}, saved)

    for form in ("text", "json"):
        location = Location(files=LocalFiles(), path=str(tmp_path / form), renames=True)
        monkeypatch.setattr(command, "locate", lambda _, location=location: location)
        result = tmp_path / f"{form}.json"
        options = ["--result_file", str(result), "--log_format", form, "--log_level", "INFO"]
        assert command.run_command("train", work, ["--config", config, *options]) == 0
        said = capfd.readouterr()
        for text in (
            said.out,
            said.err,
            *(f.read_text() for f in (result, tmp_path / form / MARKER)),
        ):
            assert "SECRET" not in text
        assert "saved in s3a://***@bucket/out;" in said.out or form == "json"
        assert json.loads(result.read_text())["model"] == "s3a://***@bucket/out"


def test_a_session_that_cannot_be_stopped_changes_nothing_about_what_was_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stop() -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    command._stop(cast(SparkSession, SimpleNamespace(stop=stop)))
    assert "Spark could not be stopped: ConnectionRefusedError: [Errno 111]" in caplog.text


DONE_ALREADY = """
import sys
from sparkdl.jobs import command, logs

command._run = lambda *_: ({"status": "complete"}, "done")
for form in ("text", "json"):
    sys.stdout = open(1, "w", closefd=False)
    code = command.run_command("train", None, ["--config", sys.argv[1], "--log_format", form])
    print(code, "as", form, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.gate
def test_last_words_that_nobody_reads_do_not_change_the_exit_code(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    config = write_configuration(tmp_path, case["said"])
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        command = [sys.executable, "-c", DONE_ALREADY, config]
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    for words in ("0 as text", "0 as json", "it was to get: done", 'get: {\\"status\\": '):
        assert words in done.stderr


def table(**metrics: tuple[float, float]) -> str:
    scores = [
        Score(name=name, metrics={"AUC": auc, "log-loss": log_loss}, seconds=2.0)
        for name, (auc, log_loss) in metrics.items()
    ]
    return format_scores(scores, {"AUC": True, "log-loss": False})


def scores(auc: float, log_loss: float) -> str:
    return table(constant=(0.5, 0.7), baseline=(0.7, 0.5), network=(auc, log_loss))


def test_the_table_says_when_the_network_does_not_win() -> None:
    assert "beats every baseline on AUC and log-loss." in scores(0.71, 0.49)
    assert "beats every baseline on AUC, but not on log-loss." in scores(0.71, 0.5)
    assert "beats every baseline on log-loss, but not on AUC." in scores(0.7, 0.49)
    assert "does not beat the best baseline on AUC or log-loss." in scores(0.69, 0.51)
    assert "beat" not in table(network=(0.7, 0.5))


@pytest.mark.parametrize("of_baselines", [(math.nan, 0.3), (0.3, math.nan)])
def test_nan_wins_and_loses_nothing_in_whatever_order_the_baselines_come(
    of_baselines: tuple[float, float],
) -> None:
    values = {"constant": of_baselines[0], "baseline": of_baselines[1], "network": 0.5}
    every = [Score(name=n, metrics={"AUC": v}, seconds=1.0) for n, v in values.items()]
    told = format_scores(every, {"AUC": True}).splitlines()[-1]
    assert told == "Nothing follows from AUC, which is nan for a model."


def test_columns_are_as_wide_as_their_names() -> None:
    lines = scores(0.71, 0.49).splitlines()
    assert lines[0].split() == ["model", "AUC", "log-loss", "seconds"]
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[3].split() == ["network", "0.7100", "0.4900", "2.0"]


PROJECT = Path(__file__).parents[2]


@pytest.mark.gate
@pytest.mark.versions
def test_spark_submit_runs_the_training_job(tmp_path: Path, case: dict[str, Any]) -> None:
    config = write_configuration(tmp_path, {**case["said"], "session": {}})
    submit = [Path(pyspark.__file__).parent / "bin" / "spark-submit"]
    submit += ["--master", "local-cluster[2,1,1024]", "--conf", "spark.ui.enabled=false"]
    submit += ["--conf", "spark.executor.memory=1024m", PROJECT / "jobs" / "train.py"]
    path = os.pathsep.join([str(PROJECT), *sys.path])
    done = subprocess.run(
        [*submit, "--config", config, "--run_id", "1"],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "model" / "_result.json").read_text())
    assert (result["status"], len(result["history"])) == ("complete", 6)
