"""Command lines and configurations that are wrong: what is said, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import ModelError
from sparkdl.jobs import command
from sparkdl.jobs.configuration.grammar import build_parser, read_settings
from sparkdl.jobs.configuration.settings import JobName, Settings

CONFIG = str(Path(__file__).parents[3] / "conf" / "flights.yaml")


def settings(*arguments: str, job: JobName = "train") -> Settings:
    return read_settings(job, ["--config", CONFIG, *arguments])


def refusal(capsys: pytest.CaptureFixture[str], job: JobName, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        settings(*arguments, job=job)
    assert caught.value.code == 2
    return capsys.readouterr().err


def written(tmp_path: Path, text: str | bytes) -> str:
    file = tmp_path / "more.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


def test_a_key_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    # The key that it begins today need not be the only one tomorrow.
    said = refusal(capsys, "train", "--estimator.epoch", "3")
    assert "no option '--estimator.epoch'; did you mean '--estimator.epochs'?" in said


@pytest.mark.parametrize("files", ["0", "-1"])
def test_a_table_of_no_files_is_refused_before_spark_starts(
    files: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "predict", f"--write.files={files}")
    assert f"write.files must be at least 1, got {files}" in said


def test_a_table_of_no_columns_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "names no column" in refusal(capsys, "predict", "--write.columns", "[]")


@pytest.mark.parametrize("character", ["{", "[", "*", "?", "\\"])
@pytest.mark.parametrize(
    ("job", "key"), [("train", "model"), ("evaluate", "model"), ("predict", "predictions")]
)
def test_a_path_that_spark_reads_as_a_pattern_is_refused(
    job: JobName, key: str, character: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, job, f"--{key}=models/a{character}b")
    assert f"--{key} 'models/a{character}b'" in said


@pytest.mark.parametrize("path", ["a b#c%20d,e", "s3a://lake/models/2026-11-23", "a}b]c"])
def test_other_characters_of_a_path_are_taken(path: str) -> None:
    assert settings(f"--model={path}").output == path


@pytest.mark.parametrize("run_id", ["", " "])
def test_a_run_id_of_nothing_is_refused(run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--run_id is empty" in refusal(capsys, "train", f"--run_id={run_id}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("# all of it commented out\n", "is empty"),
        ("- a\n- b\n", "is a list"),
        ("hello\n", "is a str"),
        (b"\xff\xfe\x00\x01", "is not valid UTF-8"),
    ],
)
def test_a_file_without_keys_is_named(
    text: str | bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, text)
    assert f"{file} {words}" in refusal(capsys, "train", "--config", file)


def test_a_file_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no/such.yaml" in refusal(capsys, "train", "--config", "/no/such.yaml")


@pytest.mark.parametrize("section", ["rows", "write", "session"])
def test_a_section_whose_keys_are_commented_out_is_its_defaults(
    section: str, tmp_path: Path
) -> None:
    read = settings("--config", written(tmp_path, f"{section}:\n  # nothing\n"), job="predict")
    defaults = build_parser("predict").get_defaults()
    assert read.sections[section] == defaults[section]


@pytest.mark.parametrize("section", ["rows", "session", "write"])
def test_a_section_that_is_a_list_is_refused(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "predict", "--config", written(tmp_path, f"{section}: [1]\n"))
    assert section in said
    assert "vars()" not in said


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The result file of an attempt that has succeeded."""
    file = tmp_path / "result.json"
    file.write_text('{"status": "complete"}')
    return file


@pytest.mark.parametrize("given", ["as words", "with =", "in a file"])
def test_a_refused_configuration_replaces_the_result_of_an_earlier_attempt(
    given: str, tmp_path: Path, earlier: Path
) -> None:
    said = {
        "as words": ["--result_file", str(earlier)],
        "with =": [f"--result_file={earlier}"],
        "in a file": ["--config", written(tmp_path, f"result_file: {earlier}\n")],
    }[given]
    with pytest.raises(SystemExit) as caught:
        command.run_command("train", never, ["--config", CONFIG, *said, "--epoch_count=3"])
    assert caught.value.code == 2
    found = json.loads(earlier.read_text())
    assert (found["status"], found["exit_code"]) == ("failed", 2)
    assert "epoch_count" in found["error"]["message"]


def test_a_file_that_yaml_cannot_read_replaces_the_result_too(
    tmp_path: Path, earlier: Path
) -> None:
    arguments = ["--config", written(tmp_path, "a: [1\nb: }"), "--result_file", str(earlier)]
    with pytest.raises(SystemExit):
        command.run_command("train", never, arguments)
    assert json.loads(earlier.read_text())["status"] == "failed"


def test_an_error_that_is_no_refusal_of_the_parsers_replaces_the_result_too(
    earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Settings:
        raise ModelError("the model does not fit")

    monkeypatch.setattr(command, "read_settings", fails)
    assert command.run_command("train", never, ["--result_file", str(earlier)]) == 4
    assert json.loads(earlier.read_text())["error"]["message"] == "the model does not fit"


def test_help_leaves_the_result_of_an_earlier_attempt(earlier: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        command.run_command("train", never, ["--result_file", str(earlier), "--help"])
    assert caught.value.code == 0
    assert json.loads(earlier.read_text()) == {"status": "complete"}


def never(context: command.JobContext) -> command.JobOutput:
    pytest.fail("it has run")


SECRET = "S3CR3T"
LINEAR = "{class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 2}}"
WHOLE = {
    "source": "{class_path: sparkdl.jobs.Files, init_args: {path: /x, format: parquet}}",
    "model": "/models/m",
}
NETWORK = {
    "model": LINEAR,
    "loss": "torch.nn.functional.cross_entropy",
    "optimizer": "{class_path: torch.optim.SGD, init_args: {lr: 0.1}}",
}


def job(estimator: dict[str, str] | None = None, **sections: str) -> str:
    """A configuration, some of whose keys are others."""
    inner = ", ".join(f"{key}: {value}" for key, value in {**NETWORK, **(estimator or {})}.items())
    whole = {**WHOLE, "estimator": f"{{{inner}}}", **sections}
    return "".join(f"{key}: {value}\n" for key, value in whole.items())


def source(arguments: str, path: str = "sparkdl.jobs.Files") -> str:
    return job(source=f"{{class_path: {path}, init_args: {{{arguments}}}}}")


WRONG = {
    "a number in session.conf": (
        job(session="{conf: {k.secret: S3CR3T, n: 2}}"),
        "session.conf must be Mapping[str, str] or null, got dict in which not all are",
    ),
    "a list": (
        job(session="{conf: [S3CR3T]}"),
        "session.conf must be Mapping[str, str] or null, got list",
    ),
    "a text": (
        job(session="{conf: S3CR3T}"),
        "session.conf must be Mapping[str, str] or null, got str",
    ),
    "a section that is a list": (job(session="[S3CR3T]"), "keys with values, got list"),
    "a section that is a text": (job(session="S3CR3T"), "session must be a section of keys"),
    "an unknown key": (
        job(session="{cnf: {k: S3CR3T}}"),
        "no key 'session.cnf'; did you mean 'conf'?",
    ),
    "an unknown section": (job(modle="S3CR3T"), "no key 'modle'; did you mean 'model'?"),
    "a missing argument": (source("options: {password: S3CR3T}"), "required: path"),
    "an option's number": (
        source("path: /x, options: {password: S3CR3T, n: 1}"),
        "source.init_args.options must be dict[str, str] or null, got dict in which not all are",
    ),
    "an argument of a class": (
        source("path: /x, optons: {password: S3CR3T}"),
        "'sparkdl.jobs.Files' takes no argument 'optons'; did you mean 'options'?",
    ),
    "a class": (
        source("path: S3CR3T", "sparkdl.jobs.Fils"),
        "has no 'Fils'; did you mean 'Files'?",
    ),
    "a module": (
        source("path: S3CR3T", "sparkdl.job.Files"),
        "'sparkdl' has no 'job'; did you mean 'jobs'?",
    ),
    "a source that is a text": (job(source="S3CR3T"), "source must be Source or null, got str"),
    "a source without a class": (job(source="{path: S3CR3T}"), "source must be Source"),
    "a text for a list": (
        job(rows="{select: S3CR3T}"),
        "rows.select must be list[str] or null, got str",
    ),
    "a text for a number": (job({"epochs": "S3CR3T"}), "estimator.epochs must be int, got a text"),
    "a list for a text": (
        job({"labelCol": "[S3CR3T]"}),
        "estimator.labelCol must be str, got list",
    ),
    "null for a text": (job({"labelCol": "null"}), "estimator.labelCol cannot be null"),
    "an unknown Param": (
        job({"epoch": "S3CR3T"}),
        "no key 'estimator.epoch'; did you mean 'epochs'?",
    ),
    "a callback's argument": (
        job(
            {
                "callbacks": "[{class_path: sparkdl.callbacks.MLflow, "
                "init_args: {tracking_ur: S3CR3T}}]"
            }
        ),
        "takes no argument 'tracking_ur'; did you mean 'tracking_uri'?",
    ),
    "a model's argument": (
        job({"model": LINEAR.replace("in_features: 2", "in_featurs: S3CR3T")}),
        "'torch.nn.Linear' takes no argument 'in_featurs'; did you mean 'in_features'?",
    ),
    "the type of a model's argument": (
        job({"model": LINEAR.replace("in_features: 2", "in_features: S3CR3T")}),
        "estimator.model.init_args.in_features must be int, got a text",
    ),
    "a loss": (
        job({"loss": "torch.nn.functional.cross_entrpy"}),
        "'torch.nn.functional' has no 'cross_entrpy'; did you mean 'cross_entropy'?",
    ),
    "an optimizer": (
        job({"optimizer": "{class_path: torch.optim.Adm, init_args: {lr: S3CR3T}}"}),
        "'torch.optim' has no 'Adm'; did you mean 'Adam'?",
    ),
    "a stage's argument": (
        job(stages="[{class_path: pyspark.ml.feature.Imputer, init_args: {inputCls: [S3CR3T]}}]"),
        "'pyspark.ml.feature.Imputer' takes no argument 'inputCls'; did you mean 'inputCols'?",
    ),
    "a level": (job(log_level="S3CR3T"), "log_level must be Literal['DEBUG', "),
    "a bracket that is missing": ("session: {conf: {k: S3CR3T}\nmodel: x\n", "in line 2, column 1"),
    "two colons": (
        job() + "password: S3CR3T: x\n",
        "mapping values are not allowed in this context",
    ),
    "a tab": ("session:\n\tpassword: S3CR3T\n", "in line 2, column 1"),
    "an alias": (job(session="{conf: {k: *S3CR3T}}"), "found undefined alias in line"),
    "a tag": (job(session="{conf: {k: !S3CR3T x}}"), "a constructor for the tag in line"),
    "a percent sign": (job(session="{conf: {k: %S3CR3T}}"), "cannot start any token in line"),
    "a key twice": (job() + "model: S3CR3T\n", "has a duplicate key 'model' in line 4, column 1"),
    "a key twice, inside": (
        job(session="{conf: {k: S3CR3T, 'k': S3CR3T}}"),
        "has a duplicate key 'k' in line 4",
    ),
    "an octal number": (job({"epochs": "010"}), "begins with 0 or has a colon"),
    "an octal number of YAML 1.2": (job({"epochs": "0o10"}), "begins with 0 or has a colon"),
    "a number in base 60": (job({"epochs": "1:30"}), "begins with 0 or has a colon"),
    "a fraction in base 60": (job({"epochs": "-1:30.5"}), "begins with 0 or has a colon"),
    "no keys": ("- S3CR3T\n", "is a list: --config takes a file of keys"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_sentence_without_the_values(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = WRONG[case]
    result = tmp_path / "result.json"
    arguments = ["--config", written(tmp_path, text), "--result_file", str(result)]
    with pytest.raises(SystemExit) as caught:
        command.run_command("train", never, arguments)
    assert caught.value.code == 2
    said = json.loads(result.read_text())["error"]["message"]
    assert words in said
    assert "\n" not in said
    shown = capsys.readouterr()
    assert said in shown.err
    assert SECRET not in shown.out + shown.err + result.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--session.conf", "{k: S3CR3T, n: 2}"], "session.conf must be Mapping[str, str]"),
        (["--session.conf", "{k: S3CR3T"], "session.conf must be Mapping[str, str]"),
        (["--sesion.conf", "S3CR3T"], "no option '--sesion.conf'; did you mean '--session.conf'?"),
        (["--session.cnf=S3CR3T"], "no option '--session.cnf'; did you mean '--session.conf'?"),
        (["S3CR3T"], "a word that belongs to no option"),
        (["--estimator.epochs", "S3CR3T"], "estimator.epochs must be int, got a text"),
        (["--estimator.epochs"], "--estimator.epochs: expected one argument"),
        (["--estimator.epochs", "010"], "--estimator.epochs must be a number in base 10"),
        (["--estimator.clipNorm=1:30"], "--estimator.clipNorm must be a number in base 10"),
        (["--source.init_args.pth", "S3CR3T"], "takes no argument 'pth'; did you mean 'path'?"),
        (
            ["--config", "https://K:S3CR3T@host/file.yaml"],
            "https://***@host/file.yaml cannot be read",
        ),
    ],
)
def test_a_wrong_command_line_is_told_without_the_values(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "train", "--config", written(tmp_path, job()), *arguments)
    assert words in said
    assert SECRET not in said


def test_numbers_texts_and_merged_keys_are_what_they_look_like(tmp_path: Path) -> None:
    text = job(
        {"clipNorm": "1e-3"},
        session="{conf: &base {a: '010', b: '1:30', c: 2026-01-01, d: spark://h:7077, e: '8'}}",
    )
    text += "run_id: '007'\ntrust: []\n"
    text = text.replace("estimator: {", "estimator: {batchSize: 16, <<: {epochs: 3}, ")
    read = settings_of(tmp_path, text)
    assert read.session["conf"] == {
        "a": "010",
        "b": "1:30",
        "c": "2026-01-01",
        "d": "spark://h:7077",
        "e": "8",
    }
    assert read.run_id == "007"
    assert (read.estimator().getEpochs(), read.estimator().getBatchSize()) == (3, 16)


def settings_of(tmp_path: Path, text: str) -> Settings:
    return read_settings("train", ["--config", written(tmp_path, text)])


def test_an_error_of_a_job_shows_no_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = job(session="{conf: {spark.hadoop.fs.s3a.secret.key: S3CR3T}}")

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("S3CR3T was refused by jdbc:x://user:S3CR3T@host/db?password=S3CR3T")

    monkeypatch.setattr(command, "_run", fails)
    result = tmp_path / "result.json"
    arguments = ["--config", written(tmp_path, text), "--result_file", str(result)]
    assert command.run_command("train", never, [*arguments, "--log_format", "json"]) == 1
    shown = capsys.readouterr()
    message = json.loads(result.read_text())["error"]["message"]
    assert message == "*** was refused by jdbc:x://***@host/db?password=***"
    assert SECRET not in shown.out + shown.err + result.read_text()
