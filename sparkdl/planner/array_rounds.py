"""Rounds that all workers take part in, computed for all of them at once.

For rounds in the driver this has to be, and is tested to be, what the averager's own decisions come
to (``driver_run``), which take ten microseconds or more for each contribution. Each round has, with
c_k the time at which worker k has ended its window::

    driver       all are sent the center at once, when the last contribution has been added;
                 they are added in the order of ranks, as fast as the driver's link carries them
    group        a sum begins when the last worker is there
    visits       nobody waits; a visitor shares the link with its host's own visit
    neighbors    each waits for two others

A worker whose exchange is under way may train on for some steps before it needs the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sparkdl.planner.cluster import Cluster, Outcome, Stretch
from sparkdl.planner.exchanges import Exchange, sum_s, summed_bytes
from sparkdl.planner.links import Link
from sparkdl.planner.step_times import Seconds

BUFFERED_BYTES = 1 << 19
"""What sockets and the averager hold of a contribution that is not its turn to be added, or of a
reply that is on its way while others' contributions are added."""


class Answer(NamedTuple):
    """The end of a round.

    Attributes:
        at: when each worker has the result, shape (workers,) or ().
        carried_s: seconds of that in which its values were on their way.
    """

    at: Seconds | np.float64
    carried_s: float


def array_rounds(exchange: Exchange, cluster: Cluster, windows: Sequence[int]) -> Outcome:
    """Let all workers train an epoch.

    Args:
        exchange: what they exchange; rounds in the driver must be those of everyone.
        cluster: who they are. The loss of a worker restarts all, from what the driver has, or with
            visits has that worker start its epoch over.
        windows: steps of each window.
    """
    generator = np.random.default_rng(cluster.seed)
    slowness, losses = cluster.slowness, cluster.lost(generator)
    loss = next(losses, (math.inf, 0))
    outcome, lanes = Outcome(), np.arange(0, cluster.workers, cluster.ranks_a_lane)
    closed = answered = np.zeros(cluster.workers)
    carried_s = since = 0.0
    index = kept = 0

    def note(before: Seconds, after: Seconds, computed: Seconds, stood: Seconds) -> None:
        carried = np.minimum(stood, carried_s)
        sums = np.add.reduceat([before, after, computed, stood - carried, carried], lanes, axis=1)
        outcome.computed, outcome.waited, outcome.exchanged = np.array(
            [outcome.computed, outcome.waited, outcome.exchanged]
        ) + sums[2:].sum(axis=1)
        counts = np.diff(lanes, append=cluster.workers)
        began, ended = sums[:2] / counts
        outcome.stretches.append(Stretch(began, ended, sums[2:]))

    while index < len(windows):
        steps = windows[index]
        overlap = min(exchange.overlap, steps) if index > kept else 0
        head, tail = (
            cluster.times.draw(generator, count, cluster.workers) * slowness
            for count in (overlap, steps - overlap)
        )
        goes_on = np.maximum(closed + head, answered)
        ended = goes_on + tail
        answer = _answer(exchange, cluster, ended, (head + tail) / steps)
        if exchange.way in ("group", "hosts") and loss[0] < np.max(answer.at):
            outcome.lose(loss[0], None)
            again = max(loss[0], float(np.min(answered))) + cluster.restart_s
            closed = answered = np.full(cluster.workers, again)
            index, since, loss = kept, 0.0, next(losses, (math.inf, 0))
            continue
        note(closed, ended, head + tail, goes_on - closed - head)
        closed, carried_s = ended, answer.carried_s
        answered = np.broadcast_to(answer.at, closed.shape)
        index, since = index + 1, since + steps
        if exchange.way == "hosts":
            kept = index
        elif exchange.commit_every and since >= exchange.commit_every and index < len(windows):
            answered = answered + exchange.commit / cluster.link.bandwidth
            outcome.driver += exchange.commit
            kept, since = index, 0.0
    note(closed, answered, np.zeros(cluster.workers), answered - closed)
    outcome.rounds, outcome.windows = len(windows), len(windows) * cluster.workers
    _end_epoch(exchange, cluster, outcome, answered, loss, losses)
    return outcome


def _answer(exchange: Exchange, cluster: Cluster, closed: Seconds, step_s: Seconds) -> Answer:
    """When workers that have ended their windows have what they exchange."""
    link, workers = cluster.link, cluster.workers
    if exchange.way == "driver":
        return from_driver(closed, exchange.up, exchange.down, link)
    if exchange.way == "hosts":
        half_s = sum_s("ring", exchange.up, cluster.within, min(cluster.per_host, workers)) / 2
        hosts = np.arange(0, workers, cluster.per_host)
        together = np.maximum.reduceat(closed, hosts) + half_s
        at, carried_s = from_driver(together, exchange.up, exchange.down, link)
        return Answer(at + half_s, carried_s + 2 * half_s)
    if exchange.way == "group":
        each_s, parts = exchange.sum_s(link, workers), exchange.buckets
        first = closed - exchange.hidden * step_s * (1 - 1 / parts)
        at = max(np.max(first) + parts * each_s, np.max(closed) + each_s)
        return Answer(np.float64(at), parts * each_s)
    if workers == 1:
        return Answer(closed, 0.0)
    one_s = max(exchange.up, exchange.down) / link.bandwidth * cluster.per_host
    if exchange.way == "neighbors":
        passing_s = 2 * link.latency + min(2, workers - 1) * one_s
        ahead, behind = np.roll(closed, 1), np.roll(closed, -1)
        return Answer(np.maximum(closed, np.maximum(ahead, behind)) + passing_s, passing_s)
    # v = 2 a + s (1 + v / (v + w)): a host is visited for the part of the time that it visits.
    work_s = cluster.times.mean * exchange.period
    alone_s = 2 * link.latency + one_s
    half = (work_s - alone_s - one_s) / 2
    visit_s = math.sqrt(half**2 + alone_s * work_s) - half
    return Answer(closed + visit_s, visit_s)


def from_driver(closed: Seconds, up: float, down: float, link: Link) -> Answer:
    """A round in the driver that everyone takes part in.

    Args:
        closed: when the workers, in the order of ranks, have ended their windows.
        up: bytes of a contribution.
        down: bytes of a reply, all of which are sent at the same time.
        link: the driver's.
    """
    count = len(closed)
    up_s, down_s = up / link.bandwidth, count * down / link.bandwidth
    # What is buffered is added in any order; otherwise a rank waits for those before it.
    order = np.sort(closed) if up <= BUFFERED_BYTES else closed
    added = np.max(order + up_s * np.arange(count, 0, -1))
    return Answer(added + down_s + 2 * link.latency, up_s + down_s + link.latency)


def _end_epoch(
    exchange: Exchange,
    cluster: Cluster,
    outcome: Outcome,
    answered: Seconds,
    loss: tuple[float, int],
    losses: Iterator[tuple[float, int]],
) -> None:
    """The driver gets its copy; and what was sent is counted."""
    way, workers, commit = exchange.way, cluster.workers, exchange.commit
    up, down = exchange.up * outcome.rounds, exchange.down * outcome.rounds
    if way in ("visits", "neighbors"):
        whole_s, answered = answered, np.array(answered)
        while loss[0] < np.max(answered):
            at, rank = loss
            if answered[rank] - whole_s[rank] <= at < answered[rank]:
                outcome.lose(at, rank)
                answered[rank] = at + cluster.restart_s + whole_s[rank]
            loss = next(losses, (math.inf, 0))
        outcome.seconds = float(from_driver(answered, commit, commit, cluster.link).at)
        outcome.driver = 2 * workers * commit
        outcome.sent = up + down if way == "visits" else min(2, workers - 1) * up
        outcome.sent *= workers > 1
        return
    outcome.seconds = float(np.max(answered)) + commit / cluster.link.bandwidth
    if way == "group":
        outcome.driver += commit
        outcome.sent = summed_bytes(exchange.topology, up, workers)
        return
    senders = workers if way == "driver" else math.ceil(workers / cluster.per_host)
    outcome.driver, outcome.sent = senders * (up + down), senders * max(up, down)
