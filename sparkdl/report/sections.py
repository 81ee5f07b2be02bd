"""The parts of a report: what workers did with their time, curves, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sparkdl.phases import PHASES
from sparkdl.redaction import without_credentials
from sparkdl.report.findings import name_of
from sparkdl.report.history import series_of
from sparkdl.report.html import Curve, axis, chart, count, duration, octets, short, text, time_unit
from sparkdl.report.recording import AGREEING, BUSY, Recording
from sparkdl.report.time_bins import TimeBins

PHASE_WORDS = {
    "read": "rows arrive, from Spark or from other workers",
    "decode": "rows become tensors, and minibatches",
    "compute": "forward, backward, optimizer steps, validation",
    "wait": "for the driver or the other workers, in a round",
    "exchange": "values are sent and received",
    "idle": "nothing to do yet: the model is being built, or others are still reading",
}


def _legend(shares: Sequence[float] | None = None) -> str:
    keys = []
    for index, name in enumerate(PHASES):
        share = "" if shares is None else f" {100 * shares[index]:.0f} %"
        keys.append(
            f'<span class="key" title="{PHASE_WORDS[name]}"><i class="{name}"></i>{name}{share}'
            "</span>"
        )
    return f'<div class="legend">{"".join(keys)}</div>'


def shares(recording: Recording) -> str:
    """One bar that shows where all workers' time went; empty if that is unknown."""
    total = recording.seconds.sum()
    if not total:
        return ""
    shares = recording.seconds.sum(axis=0) / total
    bar = "".join(
        f'<i class="{name}" style="width:{100 * share:.3f}%" '
        f'title="{name} {100 * share:.1f} %: {PHASE_WORDS[name]}"></i>'
        for name, share in zip(PHASES, shares, strict=True)
    )
    return (
        "<section><h2>Where the workers' time went</h2>"
        f'{_legend(list(shares))}<div class="bar">{bar}</div></section>'
    )


def timeline(recording: Recording, most_bins: int) -> str:
    """What each worker did when.

    Args:
        recording: of the training.
        most_bins: the most stretches of time to cut it into; half as many if there are many
            workers.
    """
    bins = recording.lanes
    if not bins.used:
        return ""
    lanes = bins.sums.shape[1]
    merged = 1
    while bins.used / merged > (most_bins if lanes <= 16 else most_bins // 2):
        merged *= 2
    width_s = bins.width_s * merged
    sums = bins.sums.reshape(-1, merged, *bins.sums.shape[1:]).sum(axis=1)
    columns = max(1, math.ceil(max(bins.ended, recording.duration_s) / width_s))
    whole_s = max(bins.ended, recording.duration_s)
    rows = [
        f'<div class="lane"><div class="name" title="{_lane_name(recording, lane)}">'
        f"{_lane_name(recording, lane)}</div>"
        f'<svg viewBox="0 0 {short(whole_s / width_s)} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{_lane_name(recording, lane)}">'
        f"{_bars(sums[:columns, lane] / (width_s * recording.ranks_a_lane))}"
        f"{_losses(recording, lane, width_s)}</svg></div>"
        for lane in range(lanes)
    ]
    labels, unit = axis(whole_s)
    several = (
        f" Each line is the mean of up to {recording.ranks_a_lane} workers."
        if recording.ranks_a_lane > 1
        else ""
    )
    return (
        "<section><h2>What each worker did when</h2>"
        f'<p class="soft">A bin is {duration(width_s)}; where nothing is drawn, the worker was not '
        f"there: Spark had not started it yet, or it was lost.{several}</p>{_legend()}"
        f'<div class="lanes{" many" if lanes > 12 else ""}">{"".join(rows)}'
        f'<div class="under"><div></div><div><div class="x">{labels}</div>'
        f'<div class="x-name">{unit} since the training began</div></div></div></div></section>'
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
    charts = []
    for title, series in series_of(recording.history)[:CHARTS]:
        curves = [
            Curve(name, points, dashed=index > 0, colour=f"c{index % 4}")
            for index, (name, points) in enumerate(series)
        ]
        charts.append(chart(title, curves, x_name="epoch", whole=True))
    return _section("Loss and metrics", charts)


def curves_over_time(recording: Recording) -> str:
    """Rows, loss, rounds and bytes over time."""
    bins = recording.trained
    if not bins.used:
        return ""
    whole_s = max(bins.ended, recording.duration_s)
    size, unit = time_unit(whole_s)
    ends = _edges(recording)
    widths = np.diff(ends)
    middles = (ends[:-1] + widths / 2) / size
    examples, loss, moved, windows, divisor = _between(bins, ends).T
    phases = _between(recording.lanes, ends).sum(axis=1)

    def curve(name: str, values: np.ndarray, **look: Any) -> Curve:
        finite = np.isfinite(values)
        pairs = zip(middles[finite].tolist(), values[finite].tolist(), strict=True)
        return Curve(name, list(pairs), **look)

    over_time = partial(
        chart, x_name=f"{unit} since the training began", x_range=(0.0, whole_s / size)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_loss = loss / divisor
        training = 1e3 * phases[:, BUSY].sum(axis=1) / windows
        agreeing = 1e3 * phases[:, AGREEING].sum(axis=1) / windows
    charts = [
        over_time("Rows a second", [curve("rows", examples / widths)], from_zero=True),
        over_time("Training loss", [curve("loss", mean_loss)]),
    ]
    if not recording.setup.collective:
        charts.append(
            over_time(
                "A worker's round",
                [
                    curve("training", training, colour="c2"),
                    curve("waiting and exchanging", agreeing, dashed=True, colour="c1"),
                ],
                from_zero=True,
                y_unit="milliseconds",
            )
        )
    charts.append(
        over_time(
            "Through the driver",
            [curve("bytes", moved / widths / 1e6, colour="c3")],
            from_zero=True,
            y_unit="MB a second",
        )
    )
    return _section("Over time", charts)


def _edges(recording: Recording) -> np.ndarray:
    """Where to cut the time into stretches, so that most of them have several windows."""
    bins = recording.trained
    width_s = max(bins.width_s, recording.lanes.width_s)
    busy = np.count_nonzero(bins.sums[:, 3])
    windows = bins.sums[:, 3].sum() / recording.world_size
    while bins.ended / width_s > STRETCHES or (
        busy and windows * width_s / bins.width_s / busy < 4 and bins.ended / width_s > 8
    ):
        width_s *= 2
    edges: np.ndarray = np.arange(0, bins.ended, width_s)
    if len(edges) > 1 and bins.ended - edges[-1] < width_s / 2:
        edges = edges[:-1]  # a stretch that is too short says nothing
    return np.append(edges, bins.ended)


def _between(bins: TimeBins, edges: np.ndarray) -> np.ndarray:
    """What was added between edges, which are starts of bins except for the last one."""
    starts = np.rint(edges[:-1] / bins.width_s).astype(int)
    sums: np.ndarray = np.add.reduceat(bins.sums, np.minimum(starts, len(bins.sums) - 1), axis=0)
    return sums


def _section(title: str, charts: Sequence[str]) -> str:
    drawn = "".join(charts)
    return f'<section><h2>{title}</h2><div class="charts">{drawn}</div></section>' if drawn else ""


WORKERS_SHOWN = 48
"""The most rows of the workers' table; if there are more, it has the slowest."""


def failures(recording: Recording) -> str:
    """Which workers were lost, when and why; empty if none were."""
    if not recording.num_failures:
        return ""
    rows = "".join(
        f"<tr><td>{duration(each.at)}</td>"
        f"<td class=text>{text(_who(recording, each.rank), 80)}</td>"
        f'<td class="text wide">{text(without_credentials(each.why), 400)}</td></tr>'
        for each in recording.failures
    )
    more = recording.num_failures - len(recording.failures)
    rest = f"<p class=soft>And {more:,} more.</p>" if more else ""
    return (
        f"<section><h2>Failures: {recording.num_failures:,}</h2><div class=scroll><table><thead>"
        "<tr><th>after</th><th class=text>who</th><th class=text>what</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{rest}</section>"
    )


def workers(recording: Recording) -> str:
    """One row per worker."""
    busy = (recording.seconds - recording.before_training)[:, BUSY].sum(axis=1)
    ranks = list(range(recording.world_size))
    note = ""
    if len(ranks) > WORKERS_SHOWN:
        ranks = sorted(ranks, key=lambda rank: -busy[rank])[:WORKERS_SHOWN]
        note = (
            f"<p class=soft>The {WORKERS_SHOWN} of {recording.world_size:,} workers that took "
            "longest for their own part.</p>"
        )
    shard_rows = recording.shard_rows or (0,) * recording.world_size
    rows = []
    for rank in ranks:
        seconds = recording.seconds[rank]
        total = seconds.sum() or 1.0
        rate = recording.rows[rank] / busy[rank] if busy[rank] else math.nan
        shares = "".join(f"<td>{100 * each / total:.0f} %</td>" for each in seconds)
        host = text(recording.hosts[rank] or "–", 60)
        rows.append(
            f"<tr><td>{rank}</td><td class='text host'>{host}</td>"
            f"<td>{shard_rows[rank]:,}</td><td>{count(rate)}</td>{shares}"
            f"<td>{octets(float(recording.sent[rank]))}</td>"
            f"<td>{octets(float(recording.received[rank]))}</td></tr>"
        )
    names = "".join(f"<th>{name}</th>" for name in PHASES)
    return (
        f"<section><h2>Workers</h2>{note}<div class=scroll><table><thead><tr><th>rank</th>"
        "<th class=text>host</th><th>rows<br>as read</th><th>rows a second<br>of its own time</th>"
        f"{names}<th>sent</th><th>received</th></tr></thead><tbody>{''.join(rows)}</tbody>"
        "</table></div></section>"
    )


def settings(recording: Recording) -> str:
    """The fit's settings; empty if they are unknown."""
    settings = recording.setup.settings
    if not settings:
        return ""
    rows = "".join(
        f"<tr><td class=text>{text(name, 80)}</td>"
        f'<td class="text wide">{text(value, 500)}</td></tr>'
        for name, value in [*sorted(settings.items()), *recording.setup.loss_use.items()]
    )
    return (
        f"<section><h2>Settings</h2><details><summary>{len(settings)} Params of the estimator"
        f"</summary><div class=scroll><table><tbody>{rows}</tbody></table></div></details>"
        "</section>"
    )


def _who(recording: Recording, rank: int | None) -> str:
    return "all workers" if rank is None else name_of(recording, rank)
