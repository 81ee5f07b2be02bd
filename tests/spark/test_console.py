"""What workers print while they fit appears in the driver, and a fit does not depend on it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import cloudpickle
import pytest
from frames import estimator, frame
from models import Net
from pyspark.sql import SparkSession
from torch import Tensor

from sparkdl.spark.board import BoardAddress
from sparkdl.spark.console import Console, forwarded

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
        Console("127.0.0.1", "127.0.0.1", on_lines) as console,
        forwarded(console.address, 1, echo=False),
    ):
        for number in range(50):
            print(number)
    assert seen == [(1, str(number)) for number in range(50)]


def test_without_an_echo_nothing_is_written_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with Console("127.0.0.1", "127.0.0.1", lambda *_: None) as console:
        with forwarded(console.address, 0, echo=False):
            print("once")
        assert capsys.readouterr().out == ""
        with forwarded(console.address, 0, echo=True):
            print("once")
        assert capsys.readouterr().out == "once\n"


def test_a_console_that_cannot_be_reached_costs_the_output_only(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with Console("127.0.0.1", "127.0.0.1") as console:
        closed = BoardAddress("127.0.0.1", console.address.port, console.address.token)
    with forwarded(closed, 2, echo=False):
        (tmp_path / "went on").touch()
    assert (tmp_path / "went on").exists()
    assert "what rank 2 prints is not shown" in caplog.text
