"""A tracking server that dies costs a training nothing but what it would have logged."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from toys import classification, make_job, mlp

from sparkdl.callbacks import Callback, MLflow, Training
from sparkdl.events import EpochSummary
from sparkdl.testing import run_world

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
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

    def trained(callbacks: Sequence[Callback]) -> Any:
        return run_world(
            make_job(mlp(), epochs=4), classification([16, 16]).shards(), callbacks=callbacks
        )

    uri = f"http://127.0.0.1:{server.server_port}"
    watched = trained([Kills(), MLflow("x", tracking_uri=uri)])
    alone = trained([])
    assert len(watched.history) == 4
    assert all(map(torch.equal, watched.module.parameters(), alone.module.parameters()))
    logged = [body for path, body in server.requests if path == "runs/log-batch"]
    steps = {metric["step"] for body in logged for metric in body.get("metrics", [])}
    assert steps == {1}
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    first, last = (each for each in said if "MLflow failed" in each)
    assert "MLflow failed in on_epoch" in first
    assert "MLflow failed in on_end" in last
