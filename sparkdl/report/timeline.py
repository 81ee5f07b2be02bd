"""The parts of a report that show what workers did with their time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sparkdl.phases import PHASES
from sparkdl.report.findings import name_of
from sparkdl.report.marks import axis, duration, short, text
from sparkdl.report.recording import Recording

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
