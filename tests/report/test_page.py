"""The page: complete, small, and deaf to what is written in names."""

from __future__ import annotations

import os
import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest
from every_row import every, every_row
from hypothesis import given
from hypothesis import strategies as st
from recordings import Play, busy_world

from sparkdl.averager.run_events import WorkerLost, WorkersRestarted
from sparkdl.phases import PHASES
from sparkdl.report.html import Curve, chart, duration, number, octets, text, ticks
from sparkdl.report.page import render, save_report
from sparkdl.report.recording import FAILURES

EVIL = "<script>alert('1')</script><img src=x onerror=\"alert(2)\"></title></style><svg onload=a()>"
NAMES = "html head meta title style body main header section footer h1 h2 p b span div i ul li svg "
NAMES += "path figure figcaption table thead tbody tr th td details summary br"
TAGS = set(NAMES.split())
MAX_BYTES = 1_000_000
VOID = ("meta", "br", "path")


class Reader(HTMLParser):
    """Reads a page as strictly as it can: every tag known, closed in order, nothing active."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attributes:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("href", "src", "action", "srcset"), (tag, name)
            assert "javascript:" not in (value or "")
            assert "url(" not in (value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "path" and self.open[-1] != "path":
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    assert set(reader.seen) - TAGS == set()
    return reader


def test_a_page_has_every_part(play: Play) -> None:
    played = busy_world(play, 3, windows=20)
    for epoch in (1, 2, 3):
        played.epoch(epoch, validation_loss=0.5)
    played.recording.note(WorkerLost(1, "its host was taken away"))
    played.recording.end("finished")
    words = " ".join(read(render(played.recording)).words)
    parts = ["finished", "of the workers' time is forward", "compute 33 %"]
    parts += ["What each worker did when", "Loss and metrics", "validation", "Rows a second"]
    parts += ["Failures: 1", "its host was taken away", "rank 1 on host-1", "Workers", *PHASES]
    assert [part for part in parts if part not in words] == []


def test_what_is_written_in_names_does_nothing(play: Play) -> None:
    played = play(2, model=EVIL, strategy=EVIL, settings={EVIL: EVIL})
    for rank in range(2):
        played.spend(rank, host=EVIL, compute=1.0)
        played.window(rank)
    played.epoch(1)
    played.recording.note(WorkerLost(1, EVIL))
    played.recording.end("failed", error=EVIL)
    page = render(played.recording)
    reader = read(page)
    assert "script" not in reader.seen
    assert "img" not in reader.seen
    assert "alert('1')" in " ".join(reader.words)  # it is there to be read
    assert re.search(r"default-src 'none'; style-src 'unsafe-inline'", page)


@given(st.text())
def test_text_is_only_text(value: str) -> None:
    reader = Reader()
    reader.feed(f'<p title="{text(value)}">{text(value)}</p>')
    reader.close()
    assert reader.seen == ["p"]
    assert "‮" not in text("‮")


@every_row((1, 1), (2, 3000), (1000, 30))
def test_a_page_is_small_whatever_the_training(play: Play, workers: int, windows: int) -> None:
    played = busy_world(play, workers, windows, settings={f"p{k}": "x" * 1000 for k in range(100)})
    for epoch in range(1, 2001):
        played.epoch(epoch, validation_loss=float(epoch % 7))
    for rank in range(300):
        played.recording.note(WorkerLost(rank % workers, "w" * 5000))
    size = len(render(played.recording).encode())
    assert size < MAX_BYTES


def test_a_training_that_has_hardly_begun_has_a_page(play: Play) -> None:
    read(render(play(3).recording))


def test_a_report_is_written_whole_over_the_one_before(play: Play, tmp_path: Path) -> None:
    played = busy_world(play, 1, windows=1)
    target = tmp_path / "a folder" / "report.html"
    for outcome in ("finished", "stopped: enough"):
        played.recording.end(outcome)
        save_report(played.recording, target)
        assert outcome in target.read_text()
    assert [each.name for each in target.parent.iterdir()] == ["report.html"]
    assert target.stat().st_mode & 0o444 == 0o444
    save_report(played.recording, f"file://{tmp_path}/uri.html")
    assert (tmp_path / "uri.html").read_text() == target.read_text()


@every_row((0o022, 0o644), (0o077, 0o600), (0o002, 0o664))
def test_a_report_has_the_rights_that_the_umask_leaves_and_nobody_elses_files_change(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: pytest.fail("of the whole process"))
            save_report(play(1).recording, tmp_path / "report.html")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == mode


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 8))
def test_ticks_are_round_few_and_inside(low: float, length: float, most: int) -> None:
    high = low + length
    found = ticks(low, high, most)
    assert 1 <= len(found) <= most
    if len(found) > 1:
        margin = 1e-6 * length + 1e-9 * abs(low)
        assert all(low - margin <= each <= high + margin for each in found)


def test_a_chart_survives_numbers_that_are_none() -> None:
    gone = [(1.0, float("nan")), (2.0, 1.0), (3.0, float("inf")), (4.0, 1.0)]
    drawn = chart("Loss", [Curve("loss", gone)], x_name="epoch")
    assert "nan" not in drawn
    assert "inf" not in drawn.replace("info", "")
    assert chart("Loss", [Curve("loss", gone[:1])], x_name="epoch") == ""


@every_row(
    (number(12345.6), "12,346"),
    (number(0.0012345), "0.00123"),
    (number(-2.5), "−2.5"),
    (number(float("nan")), "–"),
    (number(0), "0"),
    (number(0.00009392, 4), "9.392e−5"),
    (duration(0.0042), "4.2 ms"),
    (duration(75), "1 min 15 s"),
    (duration(7500), "2 h 5 min"),
    (octets(1_230_000), "1.23 MB"),
    (octets(664), "664 B"),
)
def test_numbers_have_units_and_no_more_digits_than_help(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_page_of_many_restarts_and_workers_stays_small(play: Play) -> None:
    recording = busy_world(play, 64, 3).recording
    for _ in range(FAILURES):
        recording.note(WorkersRestarted('a host & its "disk" <were> lost. ' * 20))
    assert len(render(recording).encode()) < MAX_BYTES


@every("values", [(1e308, 2.0, -1e308), (5e-324, 0.0)])
def test_a_chart_of_the_largest_and_smallest_numbers_is_drawn(values: tuple[float, ...]) -> None:
    assert "<svg" in chart("loss", [Curve("loss", list(enumerate(values)))], x_name="epoch")
