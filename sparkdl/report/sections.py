"""The parts of a report: what workers did with their time, curves, and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from sparkdl.phases import PHASES
from sparkdl.redaction import without_credentials
from sparkdl.report.findings import name_of
from sparkdl.report.history import curves_of
from sparkdl.report.html import (
    Curve,
    axis,
    chart,
    count,
    duration,
    octets,
    short,
    table,
    text,
    time_unit,
)
from sparkdl.report.recording import BUSY, Recording

PHASE_WORDS = {
    "read": "rows arrive, from Spark or from other workers",
    "decode": "rows become tensors, and minibatches",
    "compute": "forward, backward, optimizer steps, validation",
    "wait": "for the driver or the other workers, in a round",
    "exchange": "values are sent and received",
    "idle": "nothing to do yet: the model is being built, or others are still reading",
}


def _legend(recording: Recording) -> str:
    seconds = recording.seconds.sum(axis=0)
    keys = "".join(
        f'<span class="key" title="{PHASE_WORDS[name]}"><i class="{name}"></i>{name} '
        f"{100 * each / (seconds.sum() or 1.0):.0f} %</span>"
        for name, each in zip(PHASES, seconds, strict=True)
    )
    return f'<div class="legend">{keys}</div>'


def section(title: str, *parts: str) -> str:
    """A part of the page with its heading; empty if there is nothing in it."""
    inside = "".join(parts)
    return f"<section><h2>{title}</h2>{inside}</section>" if inside else ""


def timeline(recording: Recording) -> str:
    """What each worker did when, and which part of their time that is."""
    bins, each = recording.lanes, recording.ranks_a_lane
    if not bins.used:
        return ""
    lanes = bins.sums.shape[1]
    sums, width_s = bins.merged(256 if lanes <= 16 else 64)  # of which a page is most
    whole_s = max(bins.ended, recording.duration_s)
    rows = []
    for lane in range(lanes):
        name = _lane_name(recording, lane)
        rows.append(
            f'<div class="lane"><div class="name" title="{name}">{name}</div>'
            f'<svg viewBox="0 0 {short(whole_s / width_s)} 100" preserveAspectRatio="none" '
            f'role="img" aria-label="{name}">{_bars(sums[:, lane] / (width_s * each))}'
            f"{_losses(recording, lane, width_s)}</svg></div>"
        )
    labels, unit = axis(whole_s)
    several = f" Each line is the mean of up to {each} workers." if each > 1 else ""
    return section(
        "What each worker did when",
        f'<p class="soft">A bin is {duration(width_s)}; where nothing is drawn, the worker was not '
        f"there: Spark had not started it yet, or it was lost.{several}</p>{_legend(recording)}"
        f'<div class="lanes{" many" if lanes > 12 else ""}">{"".join(rows)}'
        f'<div class="under"><div></div><div><div class="x">{labels}</div>'
        f'<div class="x-name">{unit} since the training began</div></div></div></div>',
    )


def _lane_name(recording: Recording, lane: int) -> str:
    each = recording.ranks_a_lane
    first = lane * each
    last = min(first + each, recording.world_size) - 1
    return text(name_of(recording, first) if each == 1 else f"ranks {first} to {last}", 80)


def _bars(shares: np.ndarray) -> str:
    """One path per phase, of a stacked rectangle for each bin; equal neighbours are merged."""
    tops = np.rint(100 * np.minimum(np.cumsum(shares, axis=1), 1.0)).astype(int)
    paths: list[list[str]] = [[] for _ in PHASES]
    start = 0
    for column in range(1, len(tops) + 1):
        if column < len(tops) and (tops[column] == tops[start]).all():
            continue
        below = 0
        for phase, top in enumerate(tops[start].tolist()):
            if top > below:
                paths[phase].append(f"M{start} {100 - top}h{column - start}v{top - below}H{start}z")
            below = top
        start = column
    return "".join(
        f'<path class="{name}" d="{"".join(path)}"/>'
        for name, path in zip(PHASES, paths, strict=True)
        if path
    )


def _losses(recording: Recording, lane: int, width_s: float) -> str:
    marks = []
    for failure in recording.failures:
        if failure.rank is None or failure.rank // recording.ranks_a_lane == lane:
            who = "all workers" if failure.rank is None else f"rank {failure.rank}"
            # Only once: repeated in many lanes it would be most of the page.
            why = f": {failure.why}" if lane == 0 or failure.rank is not None else ""
            marks.append(
                f'<path class="lost" d="M{short(failure.at / width_s)} 0v100">'
                f"<title>{text(f'{who}{why}')}</title></path>"
            )
    return "".join(marks)


STRETCHES = 64
"""Points of a curve over time."""
CHARTS = 24
"""The most charts of metrics; the summary has the rest."""


def metric_curves(recording: Recording) -> str:
    """Losses, and any metrics, by epoch."""
    shown = curves_of(recording.history)[:CHARTS]
    return _charts("Loss and metrics", (chart(*each, x_name="epoch", whole=True) for each in shown))


def curves_over_time(recording: Recording) -> str:
    """Rows and loss over time."""
    bins = recording.trained
    # Most stretches have several windows.
    windows = bins.sums[:, 3].sum() / recording.world_size
    sums, width_s = bins.merged(min(STRETCHES, max(8.0, windows / 4)))
    size, unit = time_unit(max(bins.ended, recording.duration_s))
    middles = (np.arange(len(sums)) + 0.5) * width_s / size
    rows, loss, divisor, _ = sums.T
    known = divisor > 0
    curves = {
        "Rows a second": Curve("rows", list(zip(middles, rows / width_s, strict=True))[:-1]),
        "Training loss": Curve(
            "loss", list(zip(middles[known], loss[known] / divisor[known], strict=True))
        ),
    }
    x_name = f"{unit} since the training began"
    return _charts("Over time", (chart(n, [each], x_name=x_name) for n, each in curves.items()))


def _charts(title: str, charts: Iterable[str]) -> str:
    drawn = "".join(charts)
    return section(title, f'<div class="charts">{drawn}</div>') if drawn else ""


WORKERS_SHOWN = 48
"""The most rows of the workers' table; if there are more, it has the slowest."""


def failures(recording: Recording) -> str:
    """Which workers were lost, when and why; empty if none were."""
    if not recording.num_failures:
        return ""
    rows = (
        (
            duration(each.at),
            text("all workers" if each.rank is None else name_of(recording, each.rank), 80),
            text(without_credentials(each.why), 400),
        )
        for each in recording.failures
    )
    more = recording.num_failures - len(recording.failures)
    return section(
        f"Failures: {recording.num_failures:,}",
        table({"after": "", "who": "text", "what": "text wide"}, rows),
        f"<p class=soft>And {more:,} more.</p>" if more else "",
    )


def workers(recording: Recording) -> str:
    """One row per worker."""
    busy = (recording.seconds - recording.before_training)[:, BUSY].sum(axis=1)
    ranks, note = list(range(recording.world_size)), ""
    if len(ranks) > WORKERS_SHOWN:
        ranks = sorted(ranks, key=lambda rank: -busy[rank])[:WORKERS_SHOWN]
        note = (
            f"<p class=soft>The {WORKERS_SHOWN} of {recording.world_size:,} workers that took "
            "longest for their own part.</p>"
        )
    shard_rows = recording.shard_rows or (0,) * recording.world_size
    rates = recording.rows / np.where(busy > 0, busy, math.nan)
    rows = (
        (
            f"{rank}",
            text(recording.hosts[rank] or "–", 60),
            f"{shard_rows[rank]:,}",
            count(rates[rank]),
            *(f"{100 * each / (seconds.sum() or 1.0):.0f} %" for each in seconds),
            octets(float(recording.sent[rank])),
            octets(float(recording.received[rank])),
        )
        for rank, seconds in zip(ranks, recording.seconds[ranks], strict=True)
    )
    columns = {"rank": "", "host": "text host", "rows<br>as read": ""}
    columns |= dict.fromkeys(("rows a second<br>of its own time", *PHASES, "sent", "received"), "")
    return section("Workers", note, table(columns, rows))


def settings(recording: Recording) -> str:
    """The fit's settings; empty if they are unknown."""
    settings = recording.setup.settings
    if not settings:
        return ""
    shown = [*sorted(settings.items()), *recording.setup.loss_use.items()]
    rows = ((text(name, 80), text(value, 500)) for name, value in shown)
    return section(
        "Settings",
        f"<details><summary>{len(settings)} Params of the estimator</summary>"
        f"{table({'Param': 'text', 'value': 'text wide'}, rows)}</details>",
    )
