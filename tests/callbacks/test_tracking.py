"""TensorBoard and MLflow: what is written is read back by their own readers, as one run."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from torch import Tensor, nn
from toys import classification, make_job, mlp

from sparkdl.callbacks import Callback, MLflow, TensorBoard, Training, mlflow_run
from sparkdl.callbacks.mlflow_run import name_of
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome
from sparkdl.errors import CallbackError, ConfigError, SetupError
from sparkdl.events import EpochSummary
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import DataStatistics
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import batches_of, run_world

pytestmark = [
    pytest.mark.usefixtures("nobody_stays"),
    # Their own, and those of what they are built on.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Interrupts(Callback):
    """The driver dies in the middle of an epoch, or with it."""

    def __init__(self, epoch: int, rounds: int = 0) -> None:
        self.left = rounds
        self.epoch = epoch

    def on_round(self, training: Any, reports: Any) -> None:
        if len(training.history) == self.epoch:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("the driver dies")


def train(
    callbacks: list[Callback], path: Path | None = None, epochs: int = 4, **changes: Any
) -> Outcome:
    job = make_job(mlp(), epochs=epochs, strategy=ParameterAveraging(period=2), **changes)
    policy = None if path is None else CheckpointPolicy(path=str(path))
    data = classification([24, 24])
    return run_world(job, data.shards(), callbacks=callbacks, checkpoints=policy)


def scalars(log_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(log_dir))
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_tensorboard_reads_what_a_training_came_to(tmp_path: Path) -> None:
    outcome = train([TensorBoard(str(tmp_path))])
    read = scalars(tmp_path)
    # 24 rows in batches of 4: 6 steps an epoch, a round after 2, 4 and 6 of them.
    assert [step for step, _ in read["loss/training"]] == [6, 12, 18, 24]
    losses = [epoch.loss for epoch in outcome.history]
    assert [value for _, value in read["loss/training"]] == pytest.approx(losses, rel=1e-6)
    assert [step for step, _ in read["loss/round"]] == [*range(2, 25, 2)]
    rounds = np.array([value for _, value in read["loss/round"]]).reshape(4, 3)
    assert rounds.mean(axis=1) == pytest.approx(losses, rel=1e-5)
    shares = [read[tag] for tag in read if tag.startswith("time/")]
    assert len(shares) == 6
    assert sum(share[-1][1] for share in shares) == pytest.approx(1.0, rel=1e-5)


def test_a_resumed_fit_goes_on_with_the_same_curves(tmp_path: Path) -> None:
    """Two rounds behind the checkpoint are taken back, and trained again."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train([TensorBoard(str(whole))])
    with pytest.raises(CallbackError):
        train([TensorBoard(str(parts)), Interrupts(2, rounds=2)], tmp_path / "saved")
    train([TensorBoard(str(parts))], tmp_path / "saved")
    expected, found = scalars(whole), scalars(parts)
    for tag in ("loss/training", "loss/round"):
        # The last epoch of a checkpoint is told again, for it may not have been told before.
        assert sorted(dict(found[tag])) == sorted(dict(expected[tag]))
        assert np.array(sorted(set(found[tag]))) == pytest.approx(np.array(expected[tag]))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an empty file store, and its URI as ``uri``."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")  # to have what MLflow sets taken back
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    import mlflow

    # What is asked for has to be used, and what was set before be left.
    elsewhere = f"file://{tmp_path}/elsewhere"
    mlflow.set_tracking_uri(elsewhere)
    client = mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}/store")
    client.uri = client.tracking_uri
    yield client
    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() == elsewhere
    assert not (tmp_path / "elsewhere").exists()
    mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


@contextmanager
def using(store: Any) -> Iterator[Any]:
    """MLflow's own functions, on the store."""
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(store.uri)
    try:
        yield mlflow
    finally:
        mlflow.set_tracking_uri(before)


def runs(store: Any, name: str = "x") -> list[Any]:
    experiment = store.get_experiment_by_name(name)
    return list(store.search_runs([experiment.experiment_id]))


def history(store: Any, run: Any, name: str) -> list[tuple[int, float]]:
    found = store.get_metric_history(run.info.run_id, name)
    return sorted((metric.step, metric.value) for metric in found)


@pytest.mark.gate
def test_mlflow_has_one_run_with_settings_epochs_and_model(store: Any) -> None:
    outcome = train([MLflow("x", "first", tracking_uri=store.uri)])
    (run,) = runs(store)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params["strategy"].startswith("ParameterAveraging(period=2")
    assert run.data.params["rows"] == "48"
    expected = np.array([(epoch.epoch, epoch.loss) for epoch in outcome.history])
    assert np.array(history(store, run, "loss")) == pytest.approx(expected)
    assert len(history(store, run, "examples_per_second")) == 4
    uri = run.data.tags["sparkdl.model"]
    rows = np.random.default_rng(0).normal(size=(5, 6))
    expected_outputs = outcome.module(torch.from_numpy(rows)).detach().numpy()
    with using(store) as mlflow:
        module = mlflow.pytorch.load_model(uri)
        function = mlflow.pyfunc.load_model(uri)
    assert module(torch.from_numpy(rows)).detach().numpy() == pytest.approx(expected_outputs)
    assert function.predict(rows) == pytest.approx(expected_outputs)
    (taken,), (given,) = function.metadata.signature.inputs, function.metadata.signature.outputs
    assert (taken.shape, taken.type) == ((-1, 6), np.dtype("float64"))
    assert (given.shape, given.type) == ((-1, 3), np.dtype("float64"))


def test_a_resumed_fit_goes_on_with_the_same_run(store: Any, tmp_path: Path) -> None:
    """It died behind the third epoch, before that was saved; nothing is logged twice."""
    logs = MLflow("x", tracking_uri=store.uri, log_model=False)
    with pytest.raises(CallbackError):
        train([logs, Interrupts(2, rounds=2)], tmp_path / "saved")
    (run,) = runs(store)
    assert run.info.status == "FAILED"
    outcome = train([logs], tmp_path / "saved")
    (run,) = runs(store)
    assert run.info.status == "FINISHED"
    expected = np.array([(epoch.epoch, epoch.loss) for epoch in outcome.history])
    assert np.array(history(store, run, "loss")) == pytest.approx(expected)
    # Once more, with nothing left to train; another training has a run of its own.
    train([logs], tmp_path / "saved")
    assert len(runs(store)) == 1
    assert len(history(store, run, "loss")) == 4
    train([logs], tmp_path / "other", epochs=1)
    train([logs], epochs=1)
    assert len(runs(store)) == 3


def test_an_epoch_that_came_to_another_loss_when_it_was_trained_again_has_that_last(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(1_800_000_000)
    monkeypatch.setattr(mlflow_run, "time", SimpleNamespace(time=lambda: next(seconds)))
    logs, told = MLflow("x", tracking_uri=store.uri, log_model=False), DataStatistics((4,), ())
    for resumed, losses in ((False, (3.0, 2.0)), (True, (3.0, 1.5)), (True, (3.0, 1.5))):
        fit = Training(2, resumed=resumed, identity="one")
        logs.on_start(fit, told)
        for epoch, loss in enumerate(losses, 1):
            summary = EpochSummary(epoch=epoch, loss=loss, examples=4, rounds=1, seconds=1.0)
            logs.on_epoch(fit, summary)
        logs.on_end(fit, None)
    (run,) = runs(store)
    assert history(store, run, "loss") == [(1, 3.0), (2, 1.5), (2, 2.0)]
    assert run.data.metrics["loss"] == 1.5


def test_inside_of_a_run_of_the_users_it_is_that_one(store: Any) -> None:
    with using(store) as mlflow:
        mlflow.set_experiment("x")
        with mlflow.start_run() as mine:
            mlflow.log_param("mine", 1)
            train([MLflow(log_model=False)], epochs=1)
            assert store.get_run(mine.info.run_id).info.status == "RUNNING"
        (run,) = runs(store)
        assert run.data.params["mine"] == "1"
        assert len(history(store, run, "loss")) == 1
        mlflow.set_experiment(experiment_id="0")


def test_mlflow_takes_every_name_and_those_that_it_takes_are_left_as_they_are(store: Any) -> None:
    for name in ("a b", "top/1", "x-1.5:_", "x" * 250):
        assert name_of(name) == name
    long = "x" * 260
    given = ["a//b", "../a", "/a", ".", "..", "..a", "a/../b", "b/", "ü@", "'; --", "\n", "", "a@"]
    given += ["a#", "a_", long + "a", long + "b"]
    names = [name_of(name) for name in given]
    run = store.create_run("0")
    for name in names:
        store.log_metric(run.info.run_id, name, 1.0)
    assert sorted(store.get_run(run.info.run_id).data.metrics) == sorted(names)
    assert len(set(names)) == len(given)
    assert max(map(len, names)) <= 250


def test_metrics_whose_names_clash_have_histories_of_their_own(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"acc@1": 1.0, "acc#1": 2.0, "acc_1": 3.0}
    monkeypatch.setattr(mlflow_run, "metrics_of", lambda summary: values)
    train([MLflow("x", tracking_uri=store.uri, log_model=False)], epochs=2)
    (run,) = runs(store)
    found = {name: history(store, run, name_of(name)) for name in values}
    assert found == {name: [(1, value), (2, value)] for name, value in values.items()}


def test_metrics_of_which_one_is_called_the_validations_are_two_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measured(Callback):
        def on_epoch(self, training: Any, summary: EpochSummary) -> None:
            metrics = {"f1": 1.0, "validation_f1": 2.0}
            board.on_epoch(training, replace(summary, metrics=metrics))

    board = TensorBoard(str(tmp_path))
    train([board, Measured()], epochs=1)
    read = scalars(tmp_path)
    assert [value for _, value in read["f1/validation"]] == [1.0]
    assert [value for _, value in read["validation_f1/validation"]] == [2.0]


class TwoHeads(nn.Module):
    """Takes a dict and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3).double()
        self.embedding = nn.Embedding(5, 3).double()

    def forward(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.linear(columns["x"])
        hidden = hidden + self.embedding(columns["item"])
        return {"logits": hidden, "norm": hidden.norm(dim=1)}


def loss_of_logits(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], targets)


def test_a_model_of_several_columns_is_a_function_of_their_tensors(store: Any) -> None:
    x, item = np.random.default_rng(1).normal(size=(8, 2)), np.arange(8) % 5
    shard: list[pa.RecordBatch] = batches_of(4, x=x, item=item, label=np.arange(8) % 3)
    schema = FeedSchema(
        (ColumnSpec("x", torch.float64, (2,)), ColumnSpec("item", torch.int64)),
        ColumnSpec("label", torch.int64),
        by_name=True,
    )
    torch.manual_seed(0)
    job = make_job(TwoHeads(), schema=schema, loss=loss_of_logits)
    logs = MLflow("x", tracking_uri=store.uri)
    outcome = run_world(job, [shard], callbacks=[logs])
    expected = outcome.module({"x": torch.from_numpy(x), "item": torch.from_numpy(item)})
    (run,) = runs(store)
    with using(store) as mlflow:
        uri = run.data.tags["sparkdl.model"]
        module = mlflow.pytorch.load_model(uri)
        signature = mlflow.models.get_model_info(uri).signature
    predicted = module(torch.from_numpy(x), torch.from_numpy(item))
    for name in ("logits", "norm"):
        assert predicted[name].detach().numpy() == pytest.approx(expected[name].detach().numpy())
    assert [spec.name for spec in signature.inputs] == ["x", "item"]
    assert [spec.name for spec in signature.outputs] == ["logits", "norm"]


@every_row((TensorBoard("logs"), "tensorboard"), (MLflow(), "mlflow"))
def test_a_library_that_is_missing_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, callback: Callback, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    gone = [name for name in sys.modules if name.partition(".")[0] == missing]
    for name in [missing, *gone]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SetupError, match=rf'pip install "sparkdl-torch\[{missing}\]"'):
        train([callback], epochs=1)


@every(
    "wrong",
    [
        lambda: TensorBoard(""),
        lambda: TensorBoard(Path("x")),  # type: ignore[arg-type]
        lambda: MLflow(experiment=""),
        lambda: MLflow(log_model=1),  # type: ignore[arg-type]
        lambda: MLflow(log_model=False, registered_model_name="m"),
    ],
)
def test_arguments_out_of_range_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        wrong()


RUN = {
    "info": {"run_id": "a" * 32, "experiment_id": "1", "status": "RUNNING", "artifact_uri": ""},
    "data": {},
}
ANSWERS: dict[str, dict[str, Any]] = {
    "experiments/get-by-name": {"experiment": {"experiment_id": "1", "name": "x"}},
    "runs/create": {"run": RUN},
}


class Server(ThreadingHTTPServer):
    """Answers as MLflow's does, and keeps the paths and bodies of requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.requests: list[tuple[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def die(self) -> None:
        self.shutdown()
        self.server_close()


class Answering(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        path = self.path.partition("?")[0].rpartition("/mlflow/")[2]
        self.server.requests.append((path, json.loads(self.rfile.read(length) or "null")))
        answer = json.dumps(ANSWERS.get(path, {})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *_arguments: Any) -> None:
        """Not to stderr."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # seven by default, in two minutes
    answering = Server()
    yield answering
    answering.die()


@pytest.mark.gate
def test_a_tracking_server_that_dies_costs_only_its_run(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    class Kills(Callback):
        def on_epoch(self, training: Training, summary: EpochSummary) -> None:
            if summary.epoch == 2:
                server.die()

    uri = f"http://127.0.0.1:{server.server_port}"
    watched = train([Kills(), MLflow("x", tracking_uri=uri)])
    alone = train([])
    assert len(watched.history) == 4
    assert all(map(torch.equal, watched.module.parameters(), alone.module.parameters()))
    logged = [body for path, body in server.requests if path == "runs/log-batch"]
    steps = {metric["step"] for body in logged for metric in body.get("metrics", [])}
    assert steps == {1}
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    first, last = (each for each in said if "MLflow failed" in each)
    assert "MLflow failed in on_epoch" in first
    assert "MLflow failed in on_end" in last
