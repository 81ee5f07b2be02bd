"""The configuration file and the command line of the jobs."""

from __future__ import annotations

import functools
import logging
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every
from flights.network import DelayNetwork
from flights.preparation import Split
from flights.table import Flights
from torch import nn

from sparkdl import ParameterAveraging, TorchEstimator
from sparkdl.callbacks import TrainingReport
from sparkdl.errors import ConfigError
from sparkdl.jobs import Files, command, logs
from sparkdl.jobs.grammar import JobName, Settings, read_settings
from sparkdl.jobs.predict import _is_data
from sparkdl.jobs.train import _reports

CONFIG = str(Path(__file__).parents[2] / "conf" / "flights.yaml")

OWN = """
source:
  class_path: sparkdl.jobs.Files
  init_args: {path: [a, b], format: csv, options: {header: "true"}, schema: "x double, y int"}
estimator:
  model: {class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 3}}
  loss: torch.nn.functional.cross_entropy
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
model: m
"""


MORE = """
estimator:
  scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 3}}
  callbacks:
  - {class_path: sparkdl.callbacks.EarlyStopping, init_args: {patience: 5}}
  outputCols: {logit: logits, embedding: 1}
  validationFraction: 0.1
"""


def settings(*arguments: str, job: JobName = "train") -> Settings:
    return read_settings(job, ["--config", CONFIG, *arguments])


def own(tmp_path: Path, *arguments: str, **changed: str) -> Settings:
    """OWN with some of its lines changed, by their keys."""
    lines = [
        next((f"  {key}: {new}" for key, new in changed.items() if f"  {key}:" in line), line)
        for line in OWN.splitlines()
    ]
    (tmp_path / "own.yaml").write_text("\n".join(lines))
    return read_settings("train", ["--config", str(tmp_path / "own.yaml"), *arguments])


def refused(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def test_the_file_builds_the_real_estimator_from_importable_builders() -> None:
    read = settings()
    estimator = read.build_estimator()
    assert isinstance(estimator, TorchEstimator)
    assert isinstance(estimator.getStrategy(), ParameterAveraging)
    assert isinstance(estimator.getModel(), functools.partial)
    assert estimator.getModel().func is DelayNetwork
    assert estimator.getOptimizer().func is torch.optim.AdamW
    assert isinstance(read.source, Flights)
    assert read.source.split == Split(train_months=(1, 10), test_months=(11, 12))


def test_one_file_serves_the_three_jobs() -> None:
    outputs = {"train": "model", "evaluate": "evaluation", "predict": "predictions"}
    for job, output in outputs.items():
        assert settings(job=job).output == f"output/flights-{output}"
    predict = settings(job="predict")
    assert predict.model == "output/flights-model"
    assert predict.write.columns == ["label", "probability"]


def test_the_command_line_wins_over_the_file() -> None:
    read = settings(
        *("--estimator.epochs", "3"),
        *("--estimator.model.init_args.hidden_sizes", "[8]"),
        *("--source.init_args.test_months", "[12, 12]"),
        *("--model", "elsewhere"),
    )
    assert read.build_estimator().getEpochs() == 3
    assert read.build_estimator().getModel()().layers[0].out_features == 8
    assert read.source.split.test_months == (12, 12)  # type: ignore[attr-defined]
    assert read.output == "elsewhere"


def test_any_table_and_any_network_of_torch(tmp_path: Path) -> None:
    read = own(tmp_path, "--rows.select", '["x", "y as label"]')
    assert isinstance(read.source, Files)
    assert (read.source.path, read.source.format) == (["a", "b"], "csv")
    assert read.source.schema == "x double, y int"
    assert read.rows.select == ["x", "y as label"]
    network = read.build_estimator().getModel()()
    assert isinstance(network, nn.Linear)
    assert network.weight.shape == (3, 2)


def test_a_loss_is_a_function_a_class_with_arguments_or_the_models_own(tmp_path: Path) -> None:
    losses = {
        "torch.nn.functional.cross_entropy": nn.functional.cross_entropy,
        "model": "model",
        "torch.nn.CrossEntropyLoss": 0.0,
        "{class_path: torch.nn.CrossEntropyLoss, init_args: {label_smoothing: 0.1}}": 0.1,
    }
    for loss, expected in losses.items():
        found = own(tmp_path, loss=loss).build_estimator().getLoss()
        assert (found.label_smoothing if isinstance(found, nn.Module) else found) == expected


def test_callbacks_schedulers_stages_and_baselines_are_built(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(MORE)
    estimator = own(tmp_path, "--config", str(tmp_path / "more.yaml")).build_estimator()
    scheduler = estimator.getScheduler()
    assert scheduler(torch.optim.SGD([torch.zeros(1)], lr=1.0)).step_size == 3
    assert estimator.getCallbacks()[0].patience == 5
    assert estimator.getOutputCols() == {"logit": "logits", "embedding": 1}


def test_the_flights_have_a_report_where_the_readme_says() -> None:
    estimator = settings().build_estimator()
    assert estimator.getCallbacks() == [TrainingReport("output/flights-report.html")]
    (said,) = _reports(estimator).splitlines()
    assert f"\n{said}\nModel saved in" in (Path(CONFIG).parents[1] / "README.md").read_text()
    none = settings("--estimator.callbacks", "null").build_estimator()
    assert none.getCallbacks() is None
    assert _reports(none) == ""


def test_what_is_missing_or_contradicts_is_said_before_spark_starts() -> None:
    cases: list[tuple[JobName, list[str], str]] = [
        ("train", ["--model", "null"], "--model"),
        ("evaluate", ["--evaluation", "null"], "--evaluation"),
        ("evaluate", ["--evaluators", "{}"], "--evaluators"),
        ("predict", ["--model", "null"], "--model is required"),
        ("train", ["--rows.test", "null"], "--rows.test"),
        ("train", ["--evaluators", "{}"], "baselines are compared"),
        ("train", ["--estimator.epochs", "0"], "epochs"),
        ("train", ["--source.init_args.test_months", "[10, 12]"], "every test month after"),
    ]
    told = [(*case, refused(partial(settings, *case[1], job=case[0]))) for case in cases]
    assert [case for case in told if case[2] not in case[3]] == []


def test_the_digest_is_of_what_decides_the_output() -> None:
    same = settings().digest
    assert settings("--session.app_name", "another", "--run_id", "7").digest == same
    assert settings("--model", "elsewhere", "--estimator.progress", "false").digest == same
    assert settings("--estimator.epochs", "5").digest != same
    assert settings("--rows.train", "true").digest != same
    assert settings("--estimator.loss", "torch.nn.functional.mse_loss").digest != same
    predict = settings(job="predict").digest
    assert predict == settings("--predictions", "x", job="predict").digest
    assert predict != settings("--model", "x", job="predict").digest


def test_a_key_on_the_command_line_overrides_a_file_that_is_named_after_it() -> None:
    given = ["--estimator.epochs", "3", "--session.master", "local[1]", "--config", CONFIG]
    found = read_settings("train", given)
    assert (found.build_estimator().getEpochs(), found.session["master"]) == (3, "local[1]")


def test_what_is_printed_of_a_configuration_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        *("--config", CONFIG, "--estimator.epochs", "3", "--session.master", "null"),
        *("--estimator.optimizer", "{class_path: torch.optim.SGD, init_args: {momentum: 0.9}}"),
        *("--trust", "[flights, other]", "--run_id", "7"),
    ]
    with pytest.raises(SystemExit):
        read_settings("train", [*given, "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    again = read_settings("train", ["--config", str(tmp_path / "printed.yaml")])
    wanted = read_settings("train", given)
    assert (again.session, again.run_id) == (wanted.session, "7")
    assert again.said["trust"] == ["flights", "other"]
    estimators = again.build_estimator(), wanted.build_estimator()
    assert len({estimator.getEpochs() for estimator in estimators}) == 1
    assert len({str(estimator.getOptimizer()) for estimator in estimators}) == 1


@every("job", ["train", "evaluate", "predict"])
def test_help_is_short_enough_to_be_read(job: JobName, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_settings(job, ["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert "known subclasses" not in said
    assert "``" not in said
    assert said.startswith(f"usage: {job}.py --config FILE [--KEY VALUE] ...\n")
    assert "--rows.persist (bool): whether executors" in said
    assert "--session.conf (Mapping[str, str] or null)" in said
    assert ("--estimator.epochs (int): passes over the data (>= 1)" in said) == (job == "train")
    assert "   75  another process is writing this output; try again later" in said
    assert said.count("\n") < (450 if job == "train" else 150)


def test_the_package_alone_runs_the_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for job, usage, code in (
        ("train", "usage: train.py --config", 0),
        ("plan", "usage: plan.py", 0),
        ("tarin", "usage: python -m sparkdl.jobs train | evaluate | predict | plan", 2),
    ):
        monkeypatch.setattr(sys, "argv", ["", job, "--help"])
        with pytest.raises(SystemExit) as caught:
            runpy.run_module("sparkdl.jobs", run_name="__main__")
        assert caught.value.code == code
        assert usage in "".join(capsys.readouterr())


def test_a_split_that_is_not_by_time_is_refused() -> None:
    for learn, test in (((1, 11), (11, 12)), ((0, 3), (4, 5)), ((1, 2), (5, 4))):
        with pytest.raises(ValueError, match="every test month after training"):
            Split(train_months=learn, test_months=test)


OWN_MODULE = """
import torch
def net(): return torch.nn.Linear(2, 3)
def wide(width) -> torch.nn.Module: return torch.nn.Linear(2, width)
def loss(outputs, targets): return (outputs - targets).mean()
def adam(parameters): return torch.optim.Adam(parameters)
"""


def test_functions_of_ones_own_need_no_annotations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ownmodule.py").write_text(OWN_MODULE)
    monkeypatch.chdir(tmp_path)  # where a job is started its modules are found
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    own_functions = {"loss": "ownmodule.loss", "optimizer": "ownmodule.adam"}
    estimator = own(tmp_path, **own_functions, model="ownmodule.net").build_estimator()
    assert estimator.getLoss().__name__ == "loss"
    assert estimator.getModel()().out_features == 3
    assert isinstance(estimator.getOptimizer()([torch.zeros(1)]), torch.optim.Adam)
    model = "{class_path: ownmodule.wide, init_args: {width: 5}}"
    assert own(tmp_path, model=model).build_estimator().getModel()().out_features == 5


def test_a_run_is_called_what_the_scheduler_calls_it() -> None:
    dated = "manual__2026-11-23T00:00:00+00:00"
    for run_id in ("7", "1e3", "2026-11-23", dated, "; rm x", "{a: 1}"):
        assert settings(f"--run_id={run_id}").run_id == run_id


def test_yaml_builds_no_objects(tmp_path: Path) -> None:
    file = tmp_path / "hostile.yaml"
    file.write_text(f"model: !!python/object/apply:os.mkdir [{tmp_path / 'made'}]\n")
    refused(lambda: read_settings("train", ["--config", CONFIG, "--config", str(file)]))
    assert not (tmp_path / "made").exists()


class Open(nn.Module):
    """A network whose constructor says of its last arguments nothing."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.told = {"width": width, **options}


def test_arguments_that_only_kwargs_take_reach_the_constructor(tmp_path: Path) -> None:
    spec = f"{{class_path: {__name__}.Open, init_args: {{width: 3}}, dict_kwargs: {{depth: 2}}}}"
    model = own(tmp_path, model=spec).build_estimator().getModel()
    assert model().told == {"width": 3, "depth": 2}


@dataclass
class Size:
    """Arguments of an argument."""

    width: int
    depth: float = 1.0


class Typed(nn.Module):
    """A network whose arguments are not what YAML has."""

    def __init__(
        self,
        size: Size,
        layer: type[nn.Module],
        path: Path,
        pair: tuple[int, float],
        several: Sequence[float | None] = (),
        name: str | None = None,
        act: Callable[[Any], Any] = torch.sin,
    ) -> None:
        super().__init__()
        self.told = [size, layer, path, pair, several, name, act]


def test_arguments_are_what_their_annotations_say(tmp_path: Path) -> None:
    said = "size: {width: 3, depth: 2}, layer: torch.nn.ReLU, path: a.b, pair: [1, 2], name: a.b"
    said += ", several: [1, null], act: torch.cos"
    spec = f"{{class_path: {__name__}.Typed, init_args: {{{said}}}}}"
    model = own(tmp_path, "--estimator.model.init_args.name", "007", model=spec)
    told = [Size(3, 2.0), nn.ReLU, Path("a.b"), (1, 2.0), [1.0, None], "007", torch.cos]
    assert model.build_estimator().getModel()().told == told
    assert type(told[3][1]) is float
    for wrong in ("size.with 3", "layer torch.cos", "pair [1]", "several [x]", "act torch.pi"):
        key, value = wrong.split()
        with pytest.raises(ConfigError, match=key.partition(".")[0]):
            own(tmp_path, f"--estimator.model.init_args.{key}", value, model=spec)


def test_a_result_file_that_cannot_be_written_is_told_before_the_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own(tmp_path)
    (tmp_path / "file").touch()
    said = ["--config", str(tmp_path / "own.yaml"), "--result_file", str(tmp_path / "file" / "r")]
    monkeypatch.setattr(command, "_session", lambda settings: pytest.fail("a session was begun"))
    monkeypatch.setattr(command.logs, "configure", lambda *arguments: None)
    assert command.run_command("train", lambda work: pytest.fail("it has run"), said) == 7
    assert f"the result file {tmp_path / 'file' / 'r'} cannot be written" in caplog.text


def test_of_several_jobs_in_a_process_each_logs_in_its_own_format(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pytest's handlers, with which text is not set up anew.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for log_format in ("text", "json", "text"):
        logs.configure(log_format, None, {})
        logs.say("read")
        logging.getLogger("other").error("bad")
        out, err = capsys.readouterr()
        assert (out == "read\n") == (log_format == "text")
        assert all(line.startswith("{") == (log_format == "json") for line in err.splitlines())
        assert "bad" in err


def test_what_spark_reads_as_rows_is_known_by_its_name() -> None:
    names = ("part-0.parquet", "_day=1", "_SUCCESS", ".part-0.crc")
    assert [_is_data(name) for name in names] == [True, True, False, False]
