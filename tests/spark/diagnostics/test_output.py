"""Printed lines of workers."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from frames import estimator, frame
from models import Net
from pyspark.sql import SparkSession
from services import Intruder, console_of
from torch import Tensor
from waiting import eventually

from sparkdl.errors import DisconnectedError, StoppedError
from sparkdl.spark.diagnostics.console import Display
from sparkdl.spark.diagnostics.run_client import (
    MAX_LINE,
    MAX_LINES_A_SECOND,
    Output,
    RunClient,
    forwarded,
)


class Sent:
    """Takes what is sent, as slowly as it is told to."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.lines: list[str] = []
        self.left_out = 0
        self._seconds = seconds

    def __call__(self, lines: list[str], left_out: int) -> None:
        time.sleep(self._seconds)
        self.lines += lines
        self.left_out += left_out


def test_every_line_is_copied_in_order_and_still_written_where_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent = Sent()
    with Output(sent) as output, output.capture():
        print("one")
        print("two", file=sys.stderr)
        sys.stdout.write("thr")
        sys.stdout.write("ee\nfour\nfi")
    assert sent.lines == ["one", "two", "three", "four", "fi"]
    captured = capsys.readouterr()
    assert captured.out == "one\nthree\nfour\nfi"
    assert captured.err == "two\n"


def test_the_streams_are_given_back_also_after_an_error() -> None:
    before = sys.stdout, sys.stderr
    with Output(Sent()) as output, pytest.raises(ValueError, match="mine"), output.capture():
        raise ValueError("mine")
    assert (sys.stdout, sys.stderr) == before


def test_of_a_progress_bar_what_stays_is_sent_and_of_an_endless_line_the_beginning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent = Sent()
    with Output(sent) as output, output.capture():
        for percent in range(100):
            sys.stderr.write(f"\r{percent}%")
        sys.stderr.write("\rdone\n")
        print("x" * 10 * MAX_LINE)
    assert sent.lines == ["done", "x" * MAX_LINE + " ..."]


def test_of_a_flood_the_first_and_the_last_lines_are_sent_and_the_others_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent, many = Sent(), 100 * MAX_LINES_A_SECOND
    with Output(sent) as output, output.capture():
        print("\n".join(map(str, range(many))))
    assert sent.lines[0] == "0"
    assert sent.lines[-MAX_LINES_A_SECOND:] == list(map(str, range(many)))[-MAX_LINES_A_SECOND:]
    assert sent.left_out > 0
    assert len(sent.lines) + sent.left_out == many


def test_each_line_is_sent_or_logged_where_the_worker_has_no_log_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent, many = Sent(), 100 * MAX_LINES_A_SECOND
    with Output(sent) as output, output.capture(echo=False):
        print("\n".join(map(str, range(many))))
        print("x" * (MAX_LINE + 1))
    logged = capsys.readouterr().out.splitlines()
    assert logged[-1] == "x" * (MAX_LINE + 1)
    assert len(logged) - 1 == sent.left_out > 0
    assert sorted(map(int, [*logged[:-1], *sent.lines[:-1]])) == list(range(many))


def test_printing_does_not_wait_for_a_driver_that_takes_nothing() -> None:
    takes, waits = threading.Event(), threading.Event()

    def never(lines: list[str], left_out: int) -> None:
        takes.set()
        waits.wait(120)

    with Output(never) as output:
        output.add("first")
        assert takes.wait(30)
        for number in range(10_000):
            output.add(str(number))
        assert output._left_out == 10_000 - 2 * MAX_LINES_A_SECOND
        waits.set()


def test_a_driver_that_is_gone_ends_the_copying_only(capsys: pytest.CaptureFixture[str]) -> None:
    def gone(lines: list[str], left_out: int) -> None:
        raise StoppedError("gone")

    with Output(gone) as output, output.capture():
        print("one")
        output._thread.join(30)
        assert not output._thread.is_alive()
        print("two")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_bytes_and_text_come_in_the_order_in_which_they_were_written(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    sent = Sent()
    with Output(sent) as output, output.capture():
        sys.stdout.write("one\nca")
        sys.stdout.buffer.write("fé\ntw".encode())
        sys.stdout.write("o\n")
        sys.stdout.buffer.write("é".encode()[:1])
        sys.stdout.buffer.write("é".encode()[1:] + b"\n\xff\n")
        sys.stderr.buffer.write(b"three\n")
    assert sorted(sent.lines) == sorted(["one", "café", "two", "é", "\ufffd", "three"])
    captured = capfdbinary.readouterr()
    assert captured.out == "one\ncafé\ntwo\né\n".encode() + b"\xff\n"
    assert captured.err == b"three\n"


def test_streams_are_what_scripts_take_them_for(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout.fileno(), sys.stdout.encoding
    with Output(Sent()) as output, output.capture():
        assert isinstance(sys.stdout, io.TextIOWrapper)
        assert (sys.stdout.fileno(), sys.stdout.encoding) == before
        assert not sys.stdout.isatty()
        sys.stdout.reconfigure(line_buffering=True)
        subprocess.run([sys.executable, "-c", "print('child')"], stdout=sys.stdout, check=True)
        print("\udcff is a name of a file")
    assert "child" in (shown := capfd.readouterr().out)
    assert "\\udcff is a name of a file" in shown


def test_a_stream_without_bytes_below_it_gets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook."""
    notebook, sent = io.StringIO(), Sent()
    monkeypatch.setattr(sys, "stdout", notebook)
    with Output(sent) as output, output.capture():
        print("one")
        sys.stdout.buffer.write("zweié\n".encode())
    assert notebook.getvalue() == "one\nzweié\n"
    assert sent.lines == ["one", "zweié"]


def test_who_kept_a_stream_may_go_on_to_write(capfd: pytest.CaptureFixture[str]) -> None:
    with Output(Sent()) as output, output.capture():
        handler = logging.StreamHandler(sys.stderr)
        kept = sys.stdout
    handler.emit(logging.LogRecord("mine", logging.INFO, "", 0, "a record", None, None))
    print("later", file=kept, flush=True)
    del kept
    print("still open", flush=True)
    assert capfd.readouterr() == ("later\nstill open\n", "a record\n")


def test_threads_that_print_at_once_lose_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    taken: list[str] = []
    output = Output(Sent())
    output.add = taken.append  # type: ignore[method-assign]
    with output, output.capture():
        writers = [
            threading.Thread(target=lambda i=i: [print(f"{i}-{n}\n", end="") for n in range(500)])
            for i in range(4)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(30)
    assert sorted(taken) == sorted(f"{i}-{n}" for i in range(4) for n in range(500))
    assert sorted(capfd.readouterr().out.split()) == sorted(taken)


@pytest.mark.parametrize(
    "replace",
    [
        lambda stream: io.TextIOWrapper(stream.buffer, encoding="utf-8"),
        lambda stream: io.TextIOWrapper(stream.detach(), encoding="utf-8"),
        lambda stream: stream.close() or io.StringIO(),
        lambda stream: None,
    ],
    ids=["wrapped", "detached", "closed", "none"],
)
def test_a_script_may_replace_its_streams(
    capfd: pytest.CaptureFixture[str], replace: Callable[[Any], Any]
) -> None:
    before, sent = sys.stdout, Sent()
    with Output(sent) as output, output.capture():
        sys.stdout.write("half ")
        sys.stdout = replace(sys.stdout)
        print("a line\nand another", end="")
    assert sys.stdout is before
    assert sent.lines in (["half a line", "and another"], ["half "])
    print("still open", flush=True)
    assert capfd.readouterr().out.endswith("still open\n")


def test_what_is_freed_while_a_line_is_taken_may_print(capfd: pytest.CaptureFixture[str]) -> None:
    class Leaves:
        def __del__(self) -> None:
            print("freed")

    taken: list[str] = []

    def take(line: str) -> None:
        held.clear()
        taken.append(line)

    held = [Leaves()]
    output = Output(Sent())
    output.add = take  # type: ignore[method-assign]
    printing = threading.Thread(target=lambda: print("first"), daemon=True)
    with output, output.capture():
        printing.start()
        printing.join(60)
        assert not printing.is_alive()
    assert sorted(taken) == ["first", "freed"]


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


@pytest.mark.gate
def test_prints_and_log_records_of_a_fit_appear_behind_their_rank(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    estimator(model=Talkative(), numWorkers=3).fit(frame(spark))
    shown = sorted(capsys.readouterr().out.splitlines())
    for rank in range(3):
        assert f"[rank {rank}] features of (10, 4)" in shown
        assert f"[rank {rank}] a log record" in shown


def test_without_an_echo_nothing_is_written_twice(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    with console_of(lambda *told: seen.append(told)) as console:
        for echo, written in ((False, ""), (True, "once\nin bytes\n")):
            with forwarded(console.address, 0, echo=echo):
                print("once")
                sys.stdout.buffer.write(b"in bytes\n")
            assert capfd.readouterr().out == written
    assert [line for _, lines, _ in seen for line in lines] == ["once", "in bytes"] * 2


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
            with Intruder(console, *headers) as strange, pytest.raises(DisconnectedError):
                strange.receive_header()
            with forwarded(console.address, 0, echo=False):
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
    stream = None
    if broken != "none":
        stream = open("/dev/full", "w") if broken == "full disk" else io.StringIO()  # noqa: SIM115
    if broken == "closed":
        assert stream is not None
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    display = Display("the executor's log")
    for _ in range(3):
        display(0, ["line"], 0)
    monkeypatch.undo()
    if broken == "full disk":
        assert stream is not None
        with pytest.raises(OSError, match="No space"):
            stream.close()
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
