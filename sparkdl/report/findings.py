"""What limits a training, and what would help, in plain sentences with the numbers behind them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparkdl.errors import ConfigError
from sparkdl.phases import COMPUTE, DECODE, EXCHANGE, IDLE, READ, WAIT
from sparkdl.report.html import duration
from sparkdl.report.recording import BUSY, Recording

NOTABLE = 0.25
"""The share of the workers' time above which something is worth changing."""
MORE = 4
"""How many times as many workers to predict an epoch for."""
UNEVEN = 1.3
"""How many times the mean a worker must take to be called slow."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Where time goes.

    Attributes:
        share: of the time from beginning to end, or of all workers' time; 0 to 1.
        sentence: what was found.
        advice: what would help; empty if nothing needs to change.
    """

    share: float
    sentence: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.sentence} {self.advice}".strip()


def findings(recording: Recording) -> list[Finding]:
    """Where the time went, the largest share first; at least one finding.

    Args:
        recording: of a training, which may still be running.
    """
    total = float(recording.seconds.sum())
    if not total:
        return [Finding(0.0, "No worker has reported yet where its time went.")]
    found = (
        _launch(recording),
        _start(recording, total),
        _waiting(recording, total),
        _exchanging(recording, total),
        _feeding(recording, total),
        _computing(recording, total),
    )
    notable = [each for each in found if each.share >= NOTABLE]
    return [*sorted(notable, key=lambda each: -each.share), *_planned(recording)]


def slowest(recording: Recording) -> tuple[int, float] | None:
    """The worker that takes longest for its part of the rounds.

    Returns:
        Its rank, and its time as a multiple of the mean; None if all take about equally long.
    """
    busy = _busy(recording)
    if recording.world_size < 2 or not busy.any():
        return None
    rank = int(busy.argmax())
    times = float(busy[rank] / busy.mean())
    return (rank, times) if times >= UNEVEN else None


def name_of(recording: Recording, rank: int) -> str:
    """A worker's rank and host."""
    host = recording.hosts[rank]
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def _busy(recording: Recording) -> np.ndarray:
    """Seconds that each worker trained by itself, shape (world_size,)."""
    trained = recording.seconds - recording.before_training
    busy: np.ndarray = trained[:, BUSY].sum(axis=1)
    return busy


def _launch(recording: Recording) -> Finding:
    seconds, whole = recording.launched_s or 0.0, recording.duration_s
    share = seconds / whole if whole else 0.0
    return Finding(
        share,
        f"{_percent(share)} of the time ({seconds:.1f} s) passed before the first worker "
        "started: Spark was starting executors, Python and torch.",
        "Later fits of the same session start faster (create_session keeps processes with torch "
        "ready); for such a short training, fewer workers, or none at all, may be faster.",
    )


def _start(recording: Recording, total: float) -> Finding:
    before = recording.before_training
    trained = recording.seconds - before
    seconds = float(before.sum() + trained[:, [READ, IDLE]].sum())
    decoding = float(before[:, DECODE].sum()) > seconds / 2
    what = "turned into tensors and stored" if decoding else "read"
    advice = (
        "More epochs on the same rows cost none of it. " if recording.setup.epochs < 10 else ""
    ) + (
        "More workers share it; images cost less if they are scaled down once, upstream."
        if decoding
        else "Read from Parquet with about as many partitions as workers or more, or persist what "
        "is computed upstream."
    )
    return Finding(
        seconds / total,
        f"{_percent(seconds / total)} of the workers' time passed outside the rounds, while "
        f"rows were {what}.",
        advice,
    )


def _waiting(recording: Recording, total: float) -> Finding:
    waited = float(recording.seconds[:, WAIT].sum())
    share = waited / total
    if _waited_for_lost(recording) > waited / 2:
        return _lost(recording, share)
    slow = slowest(recording)
    busy = _busy(recording)
    # Workers that finish early wait for the last one, whatever a round costs.
    for_others = float((busy.max() - busy).sum())
    if slow is not None and for_others > waited / 2:
        return _uneven(recording, share, *slow)
    where = "the averager" if not recording.setup.collective else "the other workers"
    return Finding(
        share,
        f"{_percent(share)} of the time workers wait for {where}.",
        _fewer_rounds(recording),
    )


def _waited_for_lost(recording: Recording) -> float:
    """Seconds that workers waited while one that had been present was missing."""
    lost = {each.rank for each in recording.failures if each.rank is not None}
    bins = recording.lanes
    # A lane that several workers share counts as present while most of them are.
    there = bins.sums.sum(axis=2) > bins.width_s / 2
    awaited = np.zeros(len(there), dtype=bool)
    for lane in {rank // recording.ranks_a_lane for rank in lost}:
        seen = np.flatnonzero(there[:, lane])
        if len(seen):
            awaited[seen[0] : bins.used] |= ~there[seen[0] : bins.used, lane]
    return float(bins.sums[awaited, :, WAIT].sum())


def _lost(recording: Recording, share: float) -> Finding:
    ranks = sorted({each.rank for each in recording.failures if each.rank is not None})
    who = name_of(recording, ranks[0]) if len(ranks) == 1 else f"{len(ranks)} workers"
    back = "it was" if len(ranks) == 1 else "they were"
    return Finding(
        share,
        f"{_percent(share)} of the time workers wait, most of it for {who}, until {back} back.",
        "What was lost, when and why is listed under Failures.",
    )


def _uneven(recording: Recording, share: float, rank: int, times: float) -> Finding:
    rows = recording.rows
    more_rows = float(rows[rank] / rows.mean()) if rows.any() else 1.0
    who = name_of(recording, rank)
    sentence = (
        f"{_percent(share)} of the time workers wait for each other: {who} takes {times:.1f} times "
        "as long as the mean."
    )
    if more_rows > (1 + times) / 2:
        return Finding(
            share,
            sentence,
            f"It has {more_rows:.1f} times as many rows: shuffleRows='exchange' gives all the same "
            "number.",
        )
    return Finding(
        share,
        sentence,
        "It has no more rows than others, so its host is slower, or busy: look at it, or let "
        "the others continue without waiting, with ElasticAveraging or AsynchronousSGD.",
    )


def _fewer_rounds(recording: Recording) -> str:
    setup = recording.setup
    period = "" if setup.period is None else f"raise period (it is {setup.period})"
    if setup.aggregation == "driver":
        among = "aggregation='executors'"
        return f"{period.capitalize()}, or {among}." if period else f"Try {among}."
    if period:
        return f"{period.capitalize()}, or a larger batchSize (it is {setup.batch_size})."
    return (
        f"A larger batchSize (it is {setup.batch_size}) makes rounds rarer, and so does "
        "ParameterAveraging(period=10)."
    )


def _exchanging(recording: Recording, total: float) -> Finding:
    share = float(recording.seconds[:, EXCHANGE].sum()) / total
    setup = recording.setup
    advice = _fewer_rounds(recording)
    if setup.wire_dtype == "float32" and not setup.collective:
        advice += " wire_dtype='bfloat16' halves the bytes."
    return Finding(
        share,
        f"{_percent(share)} of the time goes into sending and receiving "
        f"{setup.model_bytes / 1e6:.3g} MB of parameters and buffers, each worker in each round.",
        advice,
    )


def _feeding(recording: Recording, total: float) -> Finding:
    trained = recording.seconds - recording.before_training
    share = float(trained[:, DECODE].sum()) / total
    return Finding(
        share,
        f"{_percent(share)} of the time goes into making minibatches of stored rows.",
        "A larger batchSize, or a cheaper batchTransform.",
    )


def _computing(recording: Recording, total: float) -> Finding:
    share = float(recording.seconds[:, COMPUTE].sum()) / total
    return Finding(
        share,
        f"{_percent(share)} of the workers' time is forward, backward and optimizer steps.",
        "That is what they are for: more workers, a GPU, or precision='bf16' on hardware that has "
        "it, would make it faster."
        if share > 0.5
        else "",
    )


def _planned(recording: Recording) -> list[Finding]:
    """What an epoch would take with more workers; nothing if this fit alone does not tell."""
    from sparkdl.planner.plan import Plan
    from sparkdl.planner.profile import Profile

    if recording.setup.traffic is None or recording.first_epoch is None:
        return []
    workers = MORE * recording.world_size
    try:
        plan = Plan([Profile.of(recording)], workers=[workers])
    except ConfigError:  # a single worker has exchanged nothing, or all of it while it computed
        return []
    now, then = plan.predict(recording.world_size), plan.predict(workers)
    return [
        Finding(
            0.0,
            f"With {workers} workers, an epoch would take {duration(then.low)} to "
            f"{duration(then.high)} in place of {duration(now.seconds)}, at an efficiency of about "
            f"{_percent(then.efficiency)}.",
            "summary.plan() says what else would change it.",
        )
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
