"""What workers print while they fit appears in the driver, and a fit does not depend on it."""

from __future__ import annotations

import io
import logging
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from frames import estimator, frame
from models import Net
from pyspark.sql import SparkSession
from services import console_of
from torch import Tensor
from waiting import eventually

from sparkdl.spark.diagnostics.console import Display
from sparkdl.spark.diagnostics.run_client import RunClient, forwarded
from sparkdl.transport.connection import Connection, ConnectionLostError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Talkative(Net):
    """Prints and logs in its first forward pass on a worker."""

    said = False

    def forward(self, features: Tensor) -> Tensor:
        from pyspark import TaskContext

        if TaskContext.get() is not None and not self.said:
            self.said = True
            print("features of", tuple(features.shape))
            logging.getLogger("mine").warning("a log record")
        return super().forward(features)


def test_prints_and_log_records_of_a_fit_appear_behind_their_rank(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    estimator(model=Talkative(), numWorkers=3).fit(frame(spark))
    shown = sorted(capsys.readouterr().out.splitlines())
    for rank in range(3):
        assert f"[rank {rank}] features of (10, 4)" in shown
        assert f"[rank {rank}] a log record" in shown


def test_lines_go_to_whoever_shows_them_and_leaving_waits_for_the_last() -> None:
    seen: list[tuple[int, str]] = []

    def on_lines(rank: int, lines: object, left_out: int) -> None:
        seen.extend((rank, line) for line in lines)  # type: ignore[attr-defined]

    with (
        console_of(on_lines) as console,
        forwarded(console.address, 1, echo=False),
    ):
        for number in range(50):
            print(number)
    assert seen == [(1, str(number)) for number in range(50)]


def test_without_an_echo_nothing_is_written_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with console_of(lambda *_: None) as console:
        with forwarded(console.address, 0, echo=False):
            print("once")
        assert capsys.readouterr().out == ""
        with forwarded(console.address, 0, echo=True):
            print("once")
        assert capsys.readouterr().out == "once\n"


def test_a_console_that_cannot_be_reached_costs_the_output_only(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with console_of(Display("its log")) as console:
        closed = console.address
    with forwarded(closed, 2, echo=False):
        (tmp_path / "went on").touch()
    assert (tmp_path / "went on").exists()
    assert "the output of rank 2 is not shown" in caplog.text


def test_a_worker_that_cannot_be_understood_is_named_and_the_others_are_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    wrong = []
    joins = {"attend": 1, "host": "h"}
    ends, left_out = "is no longer shown", "it is left out"
    cases: list[tuple[str, list[dict[str, Any]]]] = [
        (ends, [{}]),
        (ends, [{"attend": None, "host": "h"}]),
        (ends, [{"attend": "1", "host": "h"}]),
        (ends, [joins, {}]),
        (left_out, [joins, {"lines": 3, "left_out": 0}, {}]),
        (left_out, [joins, {"lines": ["a"], "left_out": None}, {}]),
        (left_out, [joins, {"stacks": 3}, {}]),
    ]
    for words, headers in cases:
        caplog.clear()
        seen: list[Any] = []
        with console_of(lambda *told, seen=seen: seen.append(told)) as console:
            address = console.address
            connected = socket.create_connection(address.host_and_port, timeout=60)
            connection = Connection(connected, 60)
            assert connection.introduce(address.token)
            for header in headers:
                connection.send_header(header)
            with pytest.raises(ConnectionLostError):
                connection.receive_header()
            connection.close()
            with forwarded(address, 0, echo=False):
                print("fine")
        if seen != [(0, ("fine",), 0)] or words not in caplog.text or ends not in caplog.text:
            wrong.append((headers, seen, caplog.text))
    assert wrong == []
    assert died == []


def test_what_the_driver_cannot_encode_is_shown_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    Display("its log")(1, ["caf\u00e9 \ud800"], 0)
    assert written.getvalue() == b"[rank 1] caf\\xe9 \\ud800\n"


@pytest.mark.parametrize("broken", ["full disk", "closed", "none"])
def test_a_standard_output_that_cannot_be_written_to_leads_to_one_warning(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = {"full disk": open("/dev/full", "w"), "closed": io.StringIO(), "none": None}[broken]  # noqa: SIM115
    if broken == "closed":
        assert stream is not None
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    display = Display("the executor's log")
    for _ in range(3):
        display(0, ["line"], 0)
    monkeypatch.undo()
    (warning,) = [each.getMessage() for each in caplog.records]
    assert "cannot be shown" in warning
    assert "the executor's log has it" in warning


def test_a_standard_output_that_nobody_reads_keeps_no_other_worker_of_the_service_waiting() -> None:
    shown, read = threading.Event(), threading.Event()

    def blocks(*told: object) -> None:
        shown.set()
        read.wait(30)

    with console_of(blocks) as console, RunClient(console.address, 0) as talks:
        talks.send_lines(["nobody reads this"], 0)
        assert shown.wait(30)
        with RunClient(console.address, 1) as other:
            assert eventually(lambda: console.stacks.ask([1]), 60)
            assert console.stacks.ask([1]).startswith("rank 1 on ")
            other.finish()
        read.set()
        talks.finish()
