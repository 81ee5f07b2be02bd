"""The curves of a report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sparkdl.report.history import series_of
from sparkdl.report.marks import Curve, chart, time_unit
from sparkdl.report.recording import AGREEING, BUSY, Recording
from sparkdl.report.time_bins import TimeBins

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
