"""The report of a training: one self-contained HTML page.

The colours of phases are those of Okabe and Ito, which people can tell apart whatever their colour
vision (Color Universal Design, 2008); so are the curves', and one of two is dashed.
"""

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


STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f7f8fa;--ink:#1a1d23;--soft:#5b6270;
--edge:#dfe3e8;--accent:#0072b2;--bad:#b3261e;--good:#00664b;
--read:#56b4e9;--decode:#0072b2;--compute:#009e73;--wait:#e69f00;--exchange:#cc79a7;--idle:#c3c8d0}
@media (prefers-color-scheme:dark){:root{--paper:#14171c;--card:#1c2027;--ink:#e8eaee;
--soft:#a2aab8;--edge:#333a45;--accent:#56b4e9;--bad:#ff8a80;--good:#4fd1a5;
--read:#56b4e9;--decode:#3987c9;--compute:#1fb489;--wait:#e69f00;--exchange:#d58fb6;--idle:#4a515e}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:1.6rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:36px 0 12px}
p{margin:.4em 0}
.soft,.unit,figcaption .unit{color:var(--soft)}
.state{font-weight:600}.state.good{color:var(--good)}.state.bad{color:var(--bad)}
.finding{margin:20px 0;padding:14px 18px;background:var(--card);border-left:4px solid var(--accent);
border-radius:4px}
.finding b{font-size:1.06rem;font-weight:600}.finding p{margin:.35em 0 0}
.finding ul{margin:.6em 0 0;padding-left:1.2em;color:var(--soft)}
.error{border-left-color:var(--bad);white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:10px}
.tile{background:var(--card);border-radius:6px;padding:10px 14px}
.tile b{display:block;font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums;
white-space:nowrap}
.tile span{color:var(--soft);font-size:.82rem}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.85rem;margin:6px 0 10px}
.key{display:inline-flex;align-items:center;gap:6px}
.key i{width:12px;height:12px;border-radius:2px;display:inline-block;flex:none}
.key i.line{height:0;width:20px;border-radius:0;border-top:2.5px solid}
.key i.line.dashed{border-top-style:dashed}
.c0{stroke:var(--decode);border-color:var(--decode)!important}
.c1{stroke:var(--wait);border-color:var(--wait)!important}
.c2{stroke:var(--compute);border-color:var(--compute)!important}
.c3{stroke:var(--exchange);border-color:var(--exchange)!important}
.bar{display:flex;height:26px;border-radius:4px;overflow:hidden}
.bar i{display:block;min-width:0}
.lanes{display:grid;grid-template-columns:fit-content(17rem) minmax(0,1fr);align-items:center;
gap:4px 10px}
.lane,.under{display:contents}
.lane .name{min-width:0;font-size:.82rem;white-space:nowrap;overflow:hidden;text-overflow:ellipsis;
text-align:right}
.lane svg{display:block;width:100%;height:24px;background:var(--card);border-radius:3px}
.many .lane svg{height:13px}.many{row-gap:2px}.many .lane .name{font-size:.74rem}
.x{position:relative;height:1.25rem;font-size:.78rem;color:var(--soft);
font-variant-numeric:tabular-nums}
.x span{position:absolute;transform:translateX(-50%);white-space:nowrap;top:3px}
.x span.first{transform:none}.x span.last{transform:translateX(-100%)}
.x-name{font-size:.78rem;color:var(--soft);text-align:center}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));
gap:30px 32px}
.chart{margin:0;min-width:0}
figcaption{font-weight:600;font-size:.95rem;overflow-wrap:anywhere}
figcaption .unit{font-weight:400}
.plot{display:grid;grid-template-columns:58px 1fr;margin-top:8px}
.y{position:relative;font-size:.78rem;color:var(--soft);font-variant-numeric:tabular-nums}
.y span{position:absolute;right:8px;transform:translateY(50%);white-space:nowrap}
.area{height:190px;border-left:1px solid var(--edge);border-bottom:1px solid var(--edge)}
.area svg{display:block;width:100%;height:100%;overflow:visible}
.plot .x,.plot .x-name{grid-column:2}
path{vector-effect:non-scaling-stroke}
.grid{stroke:var(--edge);fill:none;stroke-width:1}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}
.curve.dashed{stroke-dasharray:6 4}
.dot{fill:none;stroke-width:7;stroke-linecap:round}
.lost{stroke:var(--bad);stroke-width:3;fill:none}
.read{fill:var(--read);background:var(--read)}.decode{fill:var(--decode);background:var(--decode)}
.compute{fill:var(--compute);background:var(--compute)}.wait{fill:var(--wait);background:var(--wait)}
.exchange{fill:var(--exchange);background:var(--exchange)}.idle{fill:var(--idle);background:var(--idle)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.86rem;width:100%;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:500;text-align:right;vertical-align:bottom}
td,th{padding:5px 10px;border-bottom:1px solid var(--edge);text-align:right;white-space:nowrap}
td.text,th.text{text-align:left}
td.text{white-space:normal;overflow-wrap:anywhere;min-width:96px}
td.host{white-space:nowrap}
td.wide{white-space:pre-wrap;min-width:200px}
summary{cursor:pointer;font-weight:600}
footer{margin-top:40px;font-size:.82rem;color:var(--soft)}
@media (max-width:640px){main{padding:18px 14px 36px}h1{font-size:1.35rem}
.lanes{grid-template-columns:minmax(0,1fr);gap:2px}.under>:first-child{display:none}
.lane .name{text-align:left}
.lane svg,.many .lane svg{height:18px}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}.tile b{font-size:1.08rem}}
@media print{:root{color-scheme:light}.scroll{overflow:visible}}
"""
