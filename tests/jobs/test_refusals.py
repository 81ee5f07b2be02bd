"""Command lines and configurations that are wrong: what is said, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from every_row import every_row

from sparkdl.errors import ModelError
from sparkdl.jobs import command
from sparkdl.jobs.grammar import JobName, Settings, read_settings
from sparkdl.jobs.sources import Rows, TableFormat

CONFIG = str(Path(__file__).parents[2] / "conf" / "flights.yaml")


def settings(*arguments: str, job: JobName = "train") -> Settings:
    return read_settings(job, ["--config", CONFIG, *arguments])


def refusal(capsys: pytest.CaptureFixture[str], job: JobName, *arguments: str) -> str:
    assert command.run_command(job, never, ["--config", CONFIG, *arguments]) == 2
    return capsys.readouterr().err


def written(tmp_path: Path, text: str | bytes) -> str:
    file = tmp_path / "more.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


REFUSED: list[tuple[JobName, str, str]] = [
    ("predict", "--write.files=0", "write.files must be at least 1, got 0"),
    ("predict", "--write.files=-1", "write.files must be at least 1, got -1"),
    ("predict", "--write.columns=[]", "names no column"),
    ("train", "--run_id=", "--run_id is empty"),
    ("train", "--run_id= ", "--run_id is empty"),
    *(
        ("train", f"--run_id={run_id}", "is a template that was never filled in")
        for run_id in ("{{ ds }}", "daily-${DAY}", "$(date +%F)")
    ),
    ("train", "--config=/no/such.yaml", "/no/such.yaml"),
    *(
        (job, f"--{key}=models/a{character}b", f"--{key} 'models/a{character}b'")
        for character in "{[*?\\"
        for job, key in (("train", "model"), ("evaluate", "model"), ("predict", "predictions"))
    ),
]


def test_values_that_no_job_takes_are_refused_before_spark_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = [(*case, refusal(capsys, *case[:2])) for case in REFUSED]
    assert [case for case in told if case[2] not in case[3]] == []


def test_other_characters_of_a_path_are_taken() -> None:
    for path in ("a b#c%20d,e", "s3a://lake/models/2026-11-23", "a}b]c"):
        assert settings(f"--model={path}").output == path


def test_a_file_without_keys_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str | bytes, str] = {
        "": "is empty",
        "# all of it commented out\n": "is empty",
        "- a\n- b\n": "is a list",
        "hello\n": "is a str",
        b"\xff\xfe\x00\x01": "is not valid UTF-8",
    }
    for text, words in files.items():
        file = written(tmp_path, text)
        assert f"{file} {words}" in refusal(capsys, "train", "--config", file)


def test_a_section_is_its_defaults_if_its_keys_are_commented_out_and_is_no_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = {"rows": Rows(), "write": TableFormat(), "session": {}}
    for section, default in defaults.items():
        read = settings("--config", written(tmp_path, f"{section}:\n  # no\n"), job="predict")
        assert getattr(read, section) == default
        said = refusal(capsys, "predict", "--config", written(tmp_path, f"{section}: [1]\n"))
        assert section in said
        assert "vars()" not in said


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The result file of an attempt that has succeeded."""
    file = tmp_path / "result.json"
    file.write_text('{"status": "complete"}')
    return file


def test_a_refused_configuration_replaces_the_result_of_an_earlier_attempt(
    tmp_path: Path, earlier: Path
) -> None:
    (names := tmp_path / "names.yaml").write_text(f"result_file: {earlier}\n")
    wrong = written(tmp_path, "a: [1\nb: }")
    for said, words in (
        (["--result_file", str(earlier), "--epoch_count=3"], "epoch_count"),
        ([f"--result_file={earlier}", "--epoch_count=3"], "epoch_count"),
        (["--config", str(names), "--epoch_count=3"], "epoch_count"),
        ([f"--result_file={earlier}", "--run_id"], "run_id"),
        (["--config", wrong, "--result_file", str(earlier)], "not valid YAML"),
    ):
        earlier.write_text('{"status": "complete"}')
        assert command.run_command("train", never, ["--config", CONFIG, *said]) == 2
        found = json.loads(earlier.read_text())
        assert (found["status"], found["exit_code"]) == ("failed", 2)
        assert words in found["error"]["message"]


def test_an_error_that_is_no_refusal_of_the_parsers_replaces_the_result_too(
    earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Any:
        raise ModelError("the model does not fit")

    monkeypatch.setattr(Settings, "build_estimator", fails)
    arguments = ["--config", CONFIG, "--result_file", str(earlier)]
    assert command.run_command("train", never, arguments) == 4
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


CONF = "session.conf must be Mapping[str, str] or null, got "
CALLBACK = "[{class_path: sparkdl.callbacks.MLflow, init_args: {tracking_ur: S3CR3T}}]"
IMPUTER = "[{class_path: pyspark.ml.feature.Imputer, init_args: {inputCls: [S3CR3T]}}]"
NUMBERS = "estimator.epochs must be int, got str; write numbers without leading zeros and colons"
WRONG: list[tuple[str, str]] = [
    # sections
    (job(session="{conf: {k.secret: S3CR3T, n: 2}}"), "session.conf.n must be str, got int"),
    (job(session="{conf: [S3CR3T]}"), f"{CONF}list"),
    (job(session="{conf: S3CR3T}"), f"{CONF}str"),
    (job(session="[S3CR3T]"), "keys with values, got list"),
    (job(session="S3CR3T"), "session must be a section of keys"),
    (job(session="{cnf: {k: S3CR3T}}"), "no key 'session.cnf'; did you mean 'conf'?"),
    (job(modle="S3CR3T"), "no key 'modle'; did you mean 'model'?"),
    (job(rows="{select: S3CR3T}"), "rows.select must be list[str] or null, got str"),
    (job(log_level="S3CR3T"), "log_level must be Literal['DEBUG', "),
    # the source
    (source("options: {password: S3CR3T}"), "missing 1 required positional argument: 'path'"),
    (
        source("path: /x, options: {password: S3CR3T, n: 1}"),
        "source.init_args.options.n must be str, got int",
    ),
    (
        source("path: /x, optons: {password: S3CR3T}"),
        "'sparkdl.jobs.Files' takes no argument 'optons'; did you mean 'options'?",
    ),
    (source("path: S3CR3T", "sparkdl.jobs.Fils"), "has no 'Fils'; did you mean 'Files'?"),
    (source("path: S3CR3T", "sparkdl.job.Files"), "'sparkdl' has no 'job'; did you mean 'jobs'?"),
    (job(source="S3CR3T"), "source must be Source or null, got str; name it by its import path"),
    (job(source="{path: S3CR3T}"), "source must be Source"),
    # the estimator, and what it names
    (job({"epochs": "S3CR3T"}), "estimator.epochs must be int, got str"),
    (job({"labelCol": "[S3CR3T]"}), "estimator.labelCol must be str, got list"),
    (job({"labelCol": "null"}), "labelCol must be str, got null; leave a key out for its default"),
    (job({"epoch": "S3CR3T"}), "no key 'estimator.epoch'; did you mean 'epochs'?"),
    (job({"callbacks": CALLBACK}), "takes no argument 'tracking_ur'; did you mean 'tracking_uri'?"),
    (
        job({"model": LINEAR.replace("in_features: 2", "in_featurs: S3CR3T")}),
        "'torch.nn.Linear' takes no argument 'in_featurs'; did you mean 'in_features'?",
    ),
    (
        job({"model": LINEAR.replace("in_features: 2", "in_features: S3CR3T")}),
        "estimator.model.init_args.in_features must be int, got str",
    ),
    (
        job({"loss": "torch.nn.functional.cross_entrpy"}),
        "'torch.nn.functional' has no 'cross_entrpy'; did you mean 'cross_entropy'?",
    ),
    (
        job({"optimizer": "{class_path: torch.optim.Adm, init_args: {lr: S3CR3T}}"}),
        "'torch.optim' has no 'Adm'; did you mean 'Adam'?",
    ),
    (
        job(stages=IMPUTER),
        "'pyspark.ml.feature.Imputer' takes no argument 'inputCls'; did you mean 'inputCols'?",
    ),
    # YAML
    ("session: {conf: {k: S3CR3T}\nmodel: x\n", "in line 2, column 1"),
    (job() + "password: S3CR3T: x\n", "mapping values are not allowed here in line 4"),
    ("session:\n\tpassword: S3CR3T\n", "in line 2, column 1"),
    (job(session="{conf: {k: *S3CR3T}}"), "found undefined alias in line"),
    (job(session="{conf: {k: !S3CR3T x}}"), "a constructor for the tag in line"),
    (job(session="{conf: {k: %S3CR3T}}"), "cannot start any token in line"),
    (job() + "model: S3CR3T\n", "has a duplicate key 'model' in line 4, column 1"),
    (job(session="{conf: {k: S3CR3T, 'k': S3CR3T}}"), "has a duplicate key 'k' in line 4"),
    (job({"learningRate": "9" * 400}), "estimator.learningRate is larger than the largest float"),
    *((job({"epochs": number}), NUMBERS) for number in ("010", "0o10", "1:30", "-1:30.5")),
    ("- S3CR3T\n", "is a list: --config takes a file of keys"),
]


@every_row(*WRONG)
def test_what_is_wrong_is_said_in_one_sentence_without_the_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    result = tmp_path / "result.json"
    arguments = ["--config", written(tmp_path, text), "--result_file", str(result)]
    assert command.run_command("train", never, arguments) == 2
    said, shown = json.loads(result.read_text())["error"]["message"], capsys.readouterr()
    assert words in said
    assert "\n" not in said
    assert said in shown.err
    assert SECRET not in shown.out + shown.err + result.read_text()


def test_a_wrong_command_line_is_told_without_the_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[tuple[list[str], str]] = [
        (["--session.conf", "{k: S3CR3T, n: 2}"], "session.conf.n must be str, got int"),
        (["--session.conf", "{k: S3CR3T"], "session.conf must be Mapping[str, str]"),
        (["--sesion.conf", "S3CR3T"], "no key 'sesion'; did you mean 'session'?"),
        (["--session.cnf=S3CR3T"], "no key 'session.cnf'; did you mean 'conf'?"),
        (["S3CR3T"], "a word that belongs to no option"),
        # The key that it begins today need not be the only one tomorrow.
        (["--estimator.epoch", "3"], "no key 'estimator.epoch'; did you mean 'epochs'?"),
        (["--estimator.epochs", "S3CR3T"], "estimator.epochs must be int, got str"),
        (["--estimator.epochs"], "--estimator.epochs: expected one argument"),
        (["--estimator.epochs", "010"], NUMBERS),
        (["--estimator.clipNorm=1:30"], "estimator.clipNorm must be float or null, got str; write"),
        (["--source.init_args.pth", "S3CR3T"], "takes no argument 'pth'; did you mean 'path'?"),
        (
            ["--config", "https://K:S3CR3T@host/file.yaml"],
            "https://***@host/file.yaml cannot be re",
        ),
    ]
    config = ["--config", written(tmp_path, job())]
    told = [(*line, refusal(capsys, "train", *config, *line[0])) for line in lines]
    assert [each for each in told if each[1] not in each[2] or SECRET in each[2]] == []


def test_numbers_texts_and_merged_keys_are_what_they_look_like(tmp_path: Path) -> None:
    text = job(
        {"clipNorm": "1e-3", "learningRate": "'1e-3'", "timeout": "60", "progress": "'false'"},
        session="{conf: &base {a: 010, b: '1:30', c: 2026-01-01, d: spark://h:7077, e: '8'}}",
    )
    text += "run_id: '007'\ntrust: []\n"
    text = text.replace("estimator: {", "estimator: {batchSize: 16, <<: {epochs: 3}, ")
    read = settings_of(tmp_path, text)
    expected = ["010", "1:30", "2026-01-01", "spark://h:7077", "8"]
    assert read.session["conf"] == dict(zip("abcde", expected, strict=True))
    assert read.run_id == "007"
    estimator = read.build_estimator()
    assert (estimator.getEpochs(), estimator.getBatchSize()) == (3, 16)
    assert (estimator.getClipNorm(), estimator.getLearningRate()) == (0.001, 0.001)
    assert (estimator.getTimeout(), estimator.getProgress()) == (60.0, False)


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
