"""The bar in the driver, and silence when it is not wanted."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from every_row import every
from frames import estimator, frame
from pyspark.sql import SparkSession
from tqdm import notebook

from sparkdl.averager.messages.run_events import WorkerTimes
from sparkdl.errors import DataError, TrainingError
from sparkdl.estimator import progress
from sparkdl.estimator.progress import ProgressBar
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.phases import PHASES, PhaseTimes


def test_a_fit_without_progress_prints_nothing(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = frame(spark)
    capfd.readouterr()
    estimator(progress=False).fit(rows)
    assert capfd.readouterr() == ("", "")


def test_a_fit_with_progress_shows_rows_epoch_and_loss(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    estimator(progress=True, epochs=2).fit(frame(spark))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "reading rows" in shown.err
    assert "epoch 2/2" in shown.err
    assert "120/120" in shown.err
    assert "loss " in shown.err
    assert "rows/s" in shown.err


def window(rank: int, examples: int, loss_sum: float) -> WindowReport:
    return WindowReport(
        rank=rank, epoch=1, step=1, examples=examples, loss_sum=loss_sum, last=False
    )


def rows_known(*shard_rows: int) -> DataStatistics:
    return DataStatistics(shard_rows, ())


def on_screen(written: str) -> str:
    """What a terminal shows: a return goes to the line's start, and what follows covers it."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for piece in line.split("\r"):
            shown = piece + shown[len(piece) :]
        lines.append(shown.rstrip())
    return "\n".join(lines)


def test_a_fit_that_is_refused_while_rows_are_read_leaves_no_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(DataError), ProgressBar(2, visible=True):
        raise DataError("the label is null in 3 rows")
    shown = capsys.readouterr().err
    assert "reading rows" in shown
    assert "epoch" not in shown
    assert on_screen(shown) == ""


def test_a_fit_that_fails_while_it_trains_leaves_how_far_it_came(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = ProgressBar(2, visible=True)
    bar(rows_known(10))
    bar(window(0, 5, 2.0))
    with pytest.raises(TrainingError), bar:
        raise TrainingError("rank 0: no more")
    assert "5.00/20.0" in on_screen(capsys.readouterr().err)


ENDED = EpochSummary(epoch=1, loss=10.0, examples=10, rounds=1, seconds=1.0)


@every(
    ("events", "fragments"),
    [
        ([rows_known(10, 30), window(1, 30, 90.0)], ["epoch 1/3", "30.0/120 "]),
        ([rows_known(10, 30), window(0, 10, 10.0), window(1, 30, 90.0)], ["loss 2.5000"]),
        (
            [rows_known(10), window(0, 10, 100.0), ENDED, window(0, 10, 20.0)],
            ["loss 2.0000", "epoch 2/3"],
        ),
        ([rows_known(10), window(0, 0, 0.0)], ["loss nan"]),
    ],
)
def test_the_bar_shows_the_rows_of_all_epochs_and_the_mean_loss_of_this_one(
    capsys: pytest.CaptureFixture[str], events: list[Any], fragments: list[str]
) -> None:
    with ProgressBar(3, visible=True) as bar:
        for event in events:
            bar(event)
    shown = capsys.readouterr().err
    assert [each for each in fragments if each not in shown] == []


@every(
    ("events", "error", "expected"),
    [
        # A callback has stopped it: tqdm itself would show that as a failure.
        ([rows_known(10), window(0, 10, 1.0)], None, (10, 20, "success", None)),
        ([rows_known(10), window(0, 10, 1.0)], TrainingError("no"), (10, 20, "danger", None)),
        ([], DataError("no"), (0, 1, "info", "hidden")),
    ],
)
def test_in_a_notebook_the_color_of_the_bar_says_how_the_training_ended(
    monkeypatch: pytest.MonkeyPatch, events: list[Any], error: Exception | None, expected: Any
) -> None:
    monkeypatch.setattr(progress, "tqdm", notebook.tqdm)
    bar = ProgressBar(2, visible=True)
    with nullcontext() if error is None else pytest.raises(type(error)), bar:
        for event in events:
            bar(event)
        if error is not None:
            raise error
    shown = bar._widget
    hidden = bar._bar.container.layout.visibility
    assert (shown.value, shown.max, shown.bar_style, hidden) == expected


def times(rank: int, **seconds: float) -> WorkerTimes:
    by_phase = tuple(seconds.get(name, 0.0) for name in PHASES)
    return WorkerTimes(rank, f"host-{rank}", PhaseTimes(0.0, sum(by_phase), by_phase))


def test_the_bar_says_what_workers_do_and_who_is_slow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOOK_S", 0.0)
    with ProgressBar(1, visible=True) as bar:
        bar(rows_known(10, 10, 10))
        for rank in (0, 1):
            bar(times(rank, compute=1.0, wait=3.0))
        bar(times(2, compute=4.0))
        bar(window(0, 10, 5.0))
    shown = capsys.readouterr().err
    # 6 of 12 s each; the mean is 2 s a worker, and rank 2 takes 4.
    assert "loss 0.5000" in shown
    assert "computing 50 %" in shown
    assert "slow: rank 2 on host-2 (2.0 x)" in shown


def test_the_bar_names_nobody_where_all_are_about_as_fast(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOOK_S", 0.0)
    with ProgressBar(1, visible=True) as bar:
        bar(rows_known(10, 10))
        for rank in (0, 1):
            bar(times(rank, compute=1.0 + 0.1 * rank, wait=3.0))
        bar(window(0, 10, 5.0))
    shown = capsys.readouterr().err
    assert "waiting 74 %" in shown
    assert "slow" not in shown


def test_a_bar_that_nobody_sees_counts_nothing() -> None:
    with ProgressBar(1, visible=False) as bar:
        bar(rows_known(10))
        bar(times(0, compute=1.0))
        assert not bar._workers._busy


class Pipe(io.StringIO):
    """A stream whose reader leaves, or was never there."""

    broken = True

    def write(self, text: str) -> int:
        if self.broken:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def closed_stream() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@every("stream", [Pipe, lambda: None, closed_stream])
def test_a_bar_that_cannot_be_shown_is_left_out_with_one_warning_at_most(
    stream: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    with ProgressBar(1, visible=True) as bar:
        bar(rows_known(10, 20))
        for rank in (0, 1):
            bar(window(rank, 10, 2.0))
    # tqdm itself takes a closed stream for one that is not to be written to.
    expected = 0 if stream is closed_stream else 1
    assert len([each for each in caplog.records if "progress bar" in each.getMessage()]) == expected


def test_a_reader_that_leaves_in_the_middle_costs_only_the_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Pipe()
    stream.broken = False
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressBar(1, visible=True) as bar:
        bar(rows_known(10, 20))
        stream.broken = True
        bar(rows_known(10, 20))
        bar(window(0, 10, 2.0))
    assert "BrokenPipeError" in caplog.text
