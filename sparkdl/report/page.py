"""The report of a training: one self-contained HTML page."""

from __future__ import annotations

import math
import os
import re
import uuid
from datetime import datetime
from pathlib import Path

from pyarrow import fs

from sparkdl.redaction import without_credentials
from sparkdl.report.findings import findings
from sparkdl.report.html import count, duration, number, octets, text
from sparkdl.report.recording import Recording
from sparkdl.report.sections import (
    curves_over_time,
    failures,
    metric_curves,
    settings,
    shares,
    timeline,
    workers,
)
from sparkdl.report.style import STYLE
from sparkdl.version import __version__

MAX_BYTES = 1_000_000
"""The most bytes of a report."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for the page, or run in it: nothing."""
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def save_report(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Write a training's report, whole or not at all.

    Args:
        recording: of a training, which may still be running.
        path: where to write it; a URI that pyarrow.fs takes, or a path in the driver, whose missing
            directories are created.

    Raises:
        OSError: it cannot be written there.
    """
    page = render(recording).encode()
    where = os.fspath(path)
    if _URI.match(where):
        files, inside = fs.FileSystem.from_uri(where)
        with files.open_output_stream(inside) as stream:
            stream.write(page)
        return
    target = Path(where).expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written aside, then renamed: whoever looks during a training sees one report or the next.
    # Created under a new name, with the permissions that the umask leaves: to read the umask is to
    # change it, for all other threads' files too.
    aside = target.with_name(f".{target.name[:100]}-{uuid.uuid4().hex[:8]}")
    try:
        with open(aside, "xb") as file:
            file.write(page)
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def render(recording: Recording) -> str:
    """The report as HTML, below ``MAX_BYTES``."""
    most_bins = 256
    while True:
        page = _page(recording, most_bins)
        if len(page.encode()) < MAX_BYTES or most_bins <= 8:
            return page
        most_bins //= 2


def _page(recording: Recording, most_bins: int) -> str:
    title = f"{recording.setup.model or 'Model'}: training report"
    clocks = (
        f"Workers' clocks agree with the driver's to within {duration(recording.uncertainty_s)}. "
        if recording.uncertainty_s
        else ""
    )
    parts = [
        _head(recording),
        _findings(recording),
        _tiles(recording),
        shares(recording),
        timeline(recording, most_bins),
        metric_curves(recording),
        curves_over_time(recording),
        failures(recording),
        workers(recording),
        settings(recording),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body><main>"
        f"{''.join(parts)}"
        f"<footer>sparkdl {text(__version__)}. {clocks}What a worker does within one bin of the "
        "timeline is shown in the order of the legend, not in that in which it happened.</footer>"
        "</main></body></html>"
    )


def _head(recording: Recording) -> str:
    started = datetime.fromtimestamp(recording.started_at).astimezone()
    outcome = recording.outcome or "still running"
    kind = "bad" if outcome == "failed" else "good"
    setup = recording.setup
    before = recording.epochs_before
    resumed = (
        f"<p class=soft>Epochs 1 to {before} were trained by an earlier fit, from whose "
        "checkpoint this one resumed: times are for this one only.</p>"
        if before
        else ""
    )
    error = (
        f'<div class="finding error">{text(without_credentials(recording.error), 2000)}</div>'
        if recording.error
        else ""
    )
    return (
        f"<header><h1>{text(setup.model or 'Training')}</h1>"
        f'<p><span class="state {kind}">{text(outcome)}</span> '
        f'<span class="soft">· {started:%d %B %Y, %H:%M %Z} · {text(setup.strategy)}</span></p>'
        f"{resumed}{error}</header>"
    )


def _findings(recording: Recording) -> str:
    first, *others = findings(recording)
    advice = f"<p>{text(first.advice, 1000)}</p>" if first.advice else ""
    listed = "".join(f"<li>{text(each, 1000)}</li>" for each in others)
    return (
        f'<section class="finding"><b>{text(first.sentence, 1000)}</b>{advice}'
        f"{f'<ul>{listed}</ul>' if listed else ''}</section>"
    )


def _tiles(recording: Recording) -> str:
    setup, mine = recording.setup, recording.history[recording.epochs_before :]
    seconds = sum(epoch.seconds for epoch in mine)
    rounds = sum(epoch.rounds for epoch in mine)
    rate = sum(epoch.examples for epoch in mine) / seconds if seconds else math.nan
    values = [
        (duration(recording.duration_s), "in all"),
        (count(rate), "rows a second, in epochs"),
        (f"{len(recording.history)} of {setup.epochs}", "epochs"),
        (number(recording.world_size), "workers"),
        (count(sum(recording.shard_rows)), "rows an epoch"),
        (count(setup.parameters), "parameters"),
    ]
    if recording.history:
        last = recording.history[-1]
        values.append((number(last.loss, 4), "training loss, last epoch"))
        if last.validation_loss is not None:
            values.append((number(last.validation_loss, 4), "validation loss, last epoch"))
    if rounds and not setup.collective:
        bytes_a_round = float(recording.sent.sum() + recording.received.sum()) / rounds
        values += [
            (number(rounds), "rounds"),
            (duration(seconds / rounds), "a round, with its steps"),
            (octets(bytes_a_round), "a round, through the driver"),
        ]
    tiles = "".join(f'<div class="tile"><b>{a}</b><span>{b}</span></div>' for a, b in values)
    return f'<section class="tiles">{tiles}</section>'
