"""What limits a training, and what would help, in plain sentences with the numbers behind them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparkdl.phases import COMPUTE, DECODE, EXCHANGE, IDLE, READ, WAIT
from sparkdl.report.recording import BUSY, Recording

NOTABLE = 0.25
"""The share of the workers' time above which something is worth changing."""
UNEVEN = 1.3
"""How many times the mean a worker must take to be called slow."""


class Finding(NamedTuple):
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
    setup, before = recording.setup, recording.before_training
    trained = (recording.seconds - before).sum(axis=0)
    launched = recording.launched_s or 0.0
    outside = float(before.sum() + trained[[READ, IDLE]].sum())
    decoding = before[:, DECODE].sum() > outside / 2
    shares = recording.seconds.sum(axis=0) / total
    found = [
        _found(
            launched / max(recording.duration_s, launched, 1e-9),
            f"of the time ({launched:.1f} s) passed before the first worker started: Spark was "
            "starting executors, Python and torch.",
            "Later fits of the same session start faster; for such a short training, fewer "
            "workers, or none at all, may be faster.",
        ),
        _found(
            outside / total,
            "of the workers' time passed outside the rounds, while rows were "
            f"{'turned into tensors and stored' if decoding else 'read'}.",
            f"{'' if setup.epochs >= 10 else 'More epochs on the same rows cost none of it. '}"
            "More workers share it; images cost less if they are scaled down once, upstream. Read "
            "from Parquet with about as many partitions as workers or more, or persist what is "
            "computed upstream.",
        ),
        _waiting(recording, float(shares[WAIT])),
        _found(
            shares[EXCHANGE],
            f"of the time goes into sending and receiving {setup.model_bytes / 1e6:.3g} MB of "
            "parameters and buffers, each worker in each round.",
            _fewer_rounds(recording)
            + (
                " wire_dtype='bfloat16' halves the bytes."
                if setup.wire_dtype == "float32" and not setup.collective
                else ""
            ),
        ),
        _found(
            trained[DECODE] / total,
            "of the time goes into making minibatches of stored rows.",
            "A larger batchSize, or a cheaper batchTransform.",
        ),
        _found(
            shares[COMPUTE],
            "of the workers' time is forward, backward and optimizer steps.",
            "That is what they are for: more workers, a GPU, or precision='bf16' on hardware that "
            "has it, would make it faster.",
        ),
    ]
    found.sort(key=lambda each: -each.share)
    return [each for each in found if each.share >= NOTABLE] or found[:1]


def _found(share: float, what: str, advice: str) -> Finding:
    return Finding(float(share), f"{100 * share:.0f} % {what}", advice)


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


def _waiting(recording: Recording, share: float) -> Finding:
    waited = float(recording.seconds[:, WAIT].sum())
    ranks = sorted({each.rank for each in recording.failures if each.rank is not None})
    if ranks and _waited_for(recording, ranks) > waited / 2:
        one = len(ranks) == 1
        who = name_of(recording, ranks[0]) if one else f"{len(ranks)} workers"
        return _found(
            share,
            f"of the time workers wait, most of it for {who}, until "
            f"{'it was' if one else 'they were'} back.",
            "What was lost, when and why is listed under Failures.",
        )
    slow, busy = slowest(recording), _busy(recording)
    # Workers that finish early wait for the last one, whatever a round costs.
    if slow is None or float((busy.max() - busy).sum()) <= waited / 2:
        where = "the other workers" if recording.setup.collective else "the averager"
        return _found(share, f"of the time workers wait for {where}.", _fewer_rounds(recording))
    (rank, times), rows = slow, recording.rows
    more_rows = float(rows[rank] / rows.mean()) if rows.any() else 1.0
    return _found(
        share,
        f"of the time workers wait for each other: {name_of(recording, rank)} takes {times:.1f} "
        "times as long as the mean.",
        f"It has {more_rows:.1f} times as many rows: shuffleRows='exchange' gives all the same "
        "number."
        if more_rows > (1 + times) / 2
        else "It has no more rows than others, so its host is slower, or busy: look at it, or let "
        "the others continue without waiting, with ElasticAveraging or AsynchronousSGD.",
    )


def _waited_for(recording: Recording, lost: list[int]) -> float:
    """Seconds that workers waited while one that had been present was missing."""
    bins = recording.lanes
    # A lane that several workers share counts as present while most of them are.
    there = bins.sums.sum(axis=2) > bins.width_s / 2
    awaited = np.zeros(len(there), dtype=bool)
    for lane in {rank // recording.ranks_a_lane for rank in lost}:
        seen = np.flatnonzero(there[:, lane])
        if len(seen):
            awaited[seen[0] : bins.used] |= ~there[seen[0] : bins.used, lane]
    return float(bins.sums[awaited, :, WAIT].sum())


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
