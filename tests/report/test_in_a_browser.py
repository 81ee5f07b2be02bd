"""The report as a browser shows it: all of it fits, can be read, and needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, chromium, opened
from recordings import Play, busy_world

from sparkdl.averager.messages.run_events import WorkerLost
from sparkdl.report.page import save_report

PROGRAM = chromium()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed"),
]

HIDDEN = """
(() => [...document.querySelectorAll("main *")].filter(each => {
  if (each.closest(".scroll, svg, details")) return false;
  const box = each.getBoundingClientRect();
  return box.width && (box.left < -0.5 || box.right > innerWidth + 0.5);
}).map(each => `${each.className || each.tagName}: ${each.textContent.slice(0, 40)}`))()
"""
"""Whatever reaches over an edge of the page, but for what scrolls, is stretched or closed."""

OVERLAPS = """
(() => [...document.querySelectorAll(".x, .y")].flatMap(axis => {
  const labels = [...axis.querySelectorAll("span")].map(each => each.getBoundingClientRect());
  return labels.flatMap((a, i) => labels.slice(i + 1).filter(b =>
    a.left < b.right && b.left < a.right && a.top + 4 < b.bottom && b.top + 4 < a.bottom)
    .map(b => `${axis.textContent}`));
}))()
"""
"""Axes whose labels lie on each other."""

FAINT = """
(() => {
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(each => {
      const part = each / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = each => {
    for (; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
  };
  return [...document.querySelectorAll("main *")].filter(each =>
    !each.closest("svg") && [...each.childNodes].some(n => n.nodeType == 3 && n.data.trim())
  ).map(each => {
    const [a, b] = [light(getComputedStyle(each).color), light(behind(each))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), each.textContent.slice(0, 40)];
  }).filter(([contrast]) => contrast < 4.5);
})()
"""
"""Texts that stand out less from what is behind them than WCAG 2.1 asks for (1.4.3)."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None
    with opened(PROGRAM) as found:
        yield found


@pytest.fixture
def report(play: Play, tmp_path: Path) -> Path:
    """One with every part, and names that are long."""
    settings = {"model": "a.module.of.ours." * 20, "optimizer": "x" * 300}
    played = busy_world(play, 40, 60, model="TransformerEncoderFor" * 3, settings=settings)
    for epoch in range(1, 15):
        played.epoch(epoch, validation_loss=1e-5 / epoch, metrics={"accuracy": 1.0, "auroc": 0.9})
    played.recording.note(WorkerLost(5, "its host was taken away: " + "java.lang." * 30))
    played.recording.end("failed", error="Traceback\n  File " + "/home/someone" * 20)
    save_report(played.recording, tmp_path / "report.html")
    return tmp_path / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
def test_a_report_fits_and_can_be_read(
    browser: Browser, report: Path, width: int, scheme: str
) -> None:
    browser.open(report, width, scheme)
    assert browser.value("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.value(HIDDEN) == []
    assert browser.value(OVERLAPS) == []
    assert browser.value(FAINT) == []
    assert browser.asked_for == [report.as_uri()]
