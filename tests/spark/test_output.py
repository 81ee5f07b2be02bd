"""What is printed is copied line by line, and printing never waits."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from sparkdl.spark.output import MAX_LINE, MAX_LINES_A_SECOND, Output


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


def test_of_a_progress_bar_only_what_stays_is_sent() -> None:
    sent = Sent()
    with Output(sent) as output, output.capture():
        for percent in range(100):
            sys.stderr.write(f"\r{percent}%")
        sys.stderr.write("\rdone\n")
    assert sent.lines == ["done"]


def test_a_flood_is_cut_and_what_is_left_out_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent = Sent()
    with Output(sent) as output, output.capture():
        for number in range(10 * MAX_LINES_A_SECOND):
            print(number)
    assert 0 < len(sent.lines) <= 4 * MAX_LINES_A_SECOND
    assert len(sent.lines) + sent.left_out == 10 * MAX_LINES_A_SECOND


def test_a_line_without_end_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    sent = Sent()
    with Output(sent) as output, output.capture():
        print("x" * 10 * MAX_LINE)
    assert sent.lines == ["x" * MAX_LINE + " ..."]


def test_printing_does_not_wait_for_a_driver_that_takes_nothing() -> None:
    waits = threading.Event()

    def never(lines: list[str], left_out: int) -> None:
        waits.wait(30)

    with Output(never) as output:
        output.add("first")
        time.sleep(0.3)
        for number in range(10_000):
            output.add(str(number))
        assert output._left_out == 10_000 - MAX_LINES_A_SECOND
        waits.set()


def test_a_driver_that_is_gone_ends_the_copying_only(capsys: pytest.CaptureFixture[str]) -> None:
    def gone(lines: list[str], left_out: int) -> None:
        raise BrokenPipeError("gone")

    with Output(gone) as output, output.capture():
        print("one")
        time.sleep(0.3)
        print("two")
    assert capsys.readouterr().out == "one\ntwo\n"
