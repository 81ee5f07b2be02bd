"""The tables of a report: failures, workers, settings."""

from __future__ import annotations

import math

from sparkdl.phases import PHASES
from sparkdl.redaction import without_credentials
from sparkdl.report.findings import name_of
from sparkdl.report.marks import count, duration, octets, text
from sparkdl.report.recording import BUSY, Recording

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
