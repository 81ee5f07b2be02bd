"""Command lines and configurations that are wrong: what is said, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import ModelError
from sparkdl.jobs import command
from sparkdl.jobs.configuration.grammar import JobName, Settings, build_parser, read_settings

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
    assert "unrecognized arguments: --estimator.epoch 3" in said


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


def never(work: command.Work) -> command.Found:
    pytest.fail("it has run")
