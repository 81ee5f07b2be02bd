"""The report of a training: one self-contained HTML page.

The colours of phases are those of Okabe and Ito, which people can tell apart whatever their colour
vision (Color Universal Design, 2008); so are the curves', and one of two is dashed.
"""

from __future__ import annotations

import math
import os
import re
from datetime import datetime

from pyarrow import fs

from sparkdl.durable.local_files import LocalFiles
from sparkdl.redaction import without_credentials
from sparkdl.report.findings import findings
from sparkdl.report.html import count, duration, number, text
from sparkdl.report.recording import Recording
from sparkdl.report.sections import (
    curves_over_time,
    failures,
    metric_curves,
    settings,
    timeline,
    workers,
)
from sparkdl.version import __version__

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
    local, target = LocalFiles(), os.path.realpath(os.path.expanduser(where))
    local.create_dir(os.path.dirname(target))
    with local.open_output_stream(target) as file:
        file.write(page)


def render(recording: Recording) -> str:
    """The report as HTML: at most about a megabyte, whatever the training."""
    title = f"{recording.setup.model or 'Model'}: training report"
    parts = [
        _head(recording),
        _findings(recording),
        _tiles(recording),
        timeline(recording),
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
        f"<footer>sparkdl {text(__version__)}. Workers' clocks agree with the driver's to "
        f"within {duration(recording.uncertainty_s)}. What a worker does within one bin of the "
        "timeline is shown in the order of the legend, not in that in which it happened.</footer>"
        "</main></body></html>"
    )


def _head(recording: Recording) -> str:
    started = datetime.fromtimestamp(recording.started_at).astimezone()
    outcome = recording.outcome or "still running"
    kind = "bad" if outcome == "failed" else "good"
    setup = recording.setup
    before = recording.epochs_before
    resumed = error = ""
    if before:
        resumed = (
            f"<p class=soft>Epochs 1 to {before} were trained by an earlier fit, from whose "
            "checkpoint this one resumed: times are for this one only.</p>"
        )
    if recording.error:
        shown = text(without_credentials(recording.error), 2000)
        error = f'<div class="finding error">{shown}</div>'
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
    tiles = "".join(f'<div class="tile"><b>{a}</b><span>{b}</span></div>' for a, b in values)
    return f'<section class="tiles">{tiles}</section>'


STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f7f8fa;--ink:#1a1d23;--soft:#5b6270;
--edge:#dfe3e8;--bad:#b3261e;--good:#00664b}
@media (prefers-color-scheme:dark){:root{--paper:#14171c;--card:#1c2027;--ink:#e8eaee;
--soft:#a2aab8;--edge:#333a45;--bad:#ff8a80;--good:#4fd1a5}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,Roboto,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:28px 16px 48px}
h1{font-size:1.6rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:36px 0 12px}
p{margin:.4em 0}
.soft,.x,.x-name,.y,.tile span,footer,th{color:var(--soft);font-weight:400}
.state{font-weight:600}.good{color:var(--good)}.bad{color:var(--bad)}
.finding{margin:20px 0;padding:14px 18px;background:var(--card);border-left:4px solid #0072b2}
.finding b{font-weight:600}.finding ul{margin:.6em 0 0;padding-left:1.2em;color:var(--soft)}
.error{border-left-color:var(--bad);white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.45 monospace}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:10px}
.tile{background:var(--card);border-radius:6px;padding:10px 14px}
.tile b{display:block;font-size:1.2rem;font-weight:600;white-space:nowrap}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0 10px}
.legend,.tile span,.lane .name,table,footer{font-size:.84rem}
.key{display:inline-flex;align-items:center;gap:6px}
.key i{width:12px;height:12px;border-radius:2px;flex:none}
.key i{background:currentColor}
.key i.line{height:0;width:20px;background:none;border-top:2.5px solid}
.key i.dashed{border-top-style:dashed}
.c0,.decode{color:#0072b2}.c1,.wait{color:#e69f00}.c2,.compute{color:#009e73}
.c3,.exchange{color:#cc79a7}.read{color:#56b4e9}.idle{color:#9aa1ac}
.lanes{display:grid;grid-template-columns:fit-content(17rem) minmax(0,1fr);align-items:center;
gap:4px 10px}
.lane,.under{display:contents}
.lane .name{white-space:nowrap;overflow:hidden;text-overflow:ellipsis;text-align:right}
.lane svg{display:block;width:100%;height:24px;background:var(--card)}
.many .lane svg{height:13px}.many{row-gap:2px}.many .lane .name{font-size:.74rem}
.x{position:relative;height:1.25rem}
.x,.x-name,.y{font-size:.78rem}
.x span{position:absolute;transform:translateX(-50%);white-space:nowrap;top:3px}
.x span.first{transform:none}.x span.last{transform:translateX(-100%)}
.x-name{text-align:center}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));
gap:30px 32px}
.chart{margin:0;min-width:0}
figcaption{font-weight:600;overflow-wrap:anywhere}
.plot{display:grid;grid-template-columns:58px 1fr;margin-top:8px}
.y{position:relative}
.y span{position:absolute;right:8px;transform:translateY(50%);white-space:nowrap}
.area{height:190px;border-left:1px solid var(--edge);border-bottom:1px solid var(--edge)}
.area svg{display:block;width:100%;height:100%;overflow:visible}
.plot .x,.plot .x-name{grid-column:2}
path{vector-effect:non-scaling-stroke;fill:none}
.lane path{fill:currentColor}.lane .lost{stroke:var(--bad);stroke-width:3}
.grid{stroke:var(--edge)}
.curve,.dot{stroke:currentColor;stroke-width:2}.curve.dashed{stroke-dasharray:6 4}
.dot{stroke-width:7;stroke-linecap:round}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%}
td,th{padding:5px 10px;border-bottom:1px solid var(--edge);text-align:right;white-space:nowrap}
.text{text-align:left}
td.text{white-space:normal;overflow-wrap:anywhere;min-width:96px}
td.host{white-space:nowrap}
td.wide{white-space:pre-wrap;min-width:200px}
summary{cursor:pointer;font-weight:600}
footer{margin-top:40px}
@media (max-width:640px){.lanes{grid-template-columns:minmax(0,1fr)}
.under>:first-child{display:none}.lane .name{text-align:left}}
"""
