"""Rounds that all workers take part in, computed for all of them at once.

For rounds in the driver this has to be, and is tested to be, what the averager's own decisions come
to (``driver_run``), which take tens of microseconds for each contribution:

    driver       contributions are added in the order of ranks, as fast as the driver's link carries
                 them, and all are sent the center at once when the last one has been added
    hosts        the same, once each host's workers have summed theirs
    group        a sum begins when the last worker is there
    visits       nobody waits; a visitor shares the link with its own host's visitors
    neighbors    each waits for two others

A worker whose exchange is under way may train on for some steps before it needs the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sparkdl.planner.links import Link
from sparkdl.planner.simulation.cluster import Cluster, Epoch, Seconds
from sparkdl.planner.simulation.exchanges import Exchange, around_s
from sparkdl.planner.traffic import BACKWARD

BUFFERED_BYTES = 1 << 19
"""How much sockets and the averager hold of a contribution whose turn it is not yet, or of a reply
while others are served."""


def array_rounds(exchange: Exchange, cluster: Cluster, windows: Sequence[int]) -> Epoch:
    """Let all workers train an epoch.

    Args:
        exchange: what they exchange; rounds in the driver must be those of everyone.
        cluster: who they are.
        windows: steps of each window.
    """
    generator, slowness = np.random.default_rng(cluster.seed), cluster.slowness
    epoch = Epoch(strategy=exchange.name, rounds=len(windows))
    closed = answered = np.zeros(cluster.workers)
    since, carried_s = 0, own_s(exchange, cluster)

    def draw(steps: int) -> Seconds:
        none = np.zeros(cluster.workers)
        return cluster.times.draw(generator, steps, cluster.workers) * slowness if steps else none

    for index, steps in enumerate(windows):
        overlap = min(exchange.overlap, steps) if since else 0
        head, tail = draw(overlap), draw(steps - overlap)
        goes_on = np.maximum(closed + head, answered)
        ended = goes_on + tail
        answer = _answered(exchange, cluster, ended, (head + tail) / max(steps, 1))
        epoch.count(head + tail, goes_on - closed - head, carried_s)
        closed, answered = ended, answer
        since += steps
        if exchange.commit_every and since >= exchange.commit_every and index + 1 < len(windows):
            answered = answered + exchange.commit / cluster.link.bandwidth
            since = 0
    if exchange.final is not None:
        longer = cluster.workers * (exchange.final - exchange.down)
        answered = answered + longer / cluster.link.bandwidth
    pairs = exchange.way in ("visits", "neighbors")
    if pairs and exchange.commit:  # a contribution of each, while a group's is one worker's
        answered = from_driver(answered, exchange.commit, exchange.commit, cluster.link)
    epoch.count(0.0, answered - closed, carried_s)
    if not pairs:
        answered = answered + exchange.commit / cluster.link.bandwidth
    epoch.windows, epoch.lasted = len(windows) * cluster.workers, float(np.max(answered))
    return epoch


def own_s(exchange: Exchange, cluster: Cluster) -> float:
    """Seconds of an exchange in which a worker's own values are on their way."""
    if exchange.way == "group":
        parts, workers = exchange.buckets, cluster.workers
        return parts * around_s(exchange.up / parts, cluster.link, workers)
    passing_s = (exchange.up + exchange.down) / cluster.link.bandwidth
    return passing_s + 2 * cluster.link.latency


def from_driver(closed: Seconds, up: float, down: float, link: Link) -> Seconds:
    """When workers have the result of a round in the driver that everyone takes part in.

    Args:
        closed: when the workers, in the order of ranks, have ended their windows.
        up: bytes of a contribution.
        down: bytes of a reply, all of which are sent at the same time.
        link: the driver's.
    """
    count = len(closed)
    # What is buffered is added in any order; otherwise a rank waits for those before it.
    order = np.sort(closed) if up <= BUFFERED_BYTES else closed
    added = np.max(order + up / link.bandwidth * np.arange(count, 0, -1))
    return np.full(count, added + count * down / link.bandwidth + 2 * link.latency)


def _answered(exchange: Exchange, cluster: Cluster, closed: Seconds, step_s: Seconds) -> Seconds:
    """When workers that have ended their windows have what they exchange."""
    link, workers = cluster.link, cluster.workers
    if exchange.way == "driver":
        return from_driver(closed, exchange.up, exchange.down, link)
    if exchange.way == "hosts":
        half_s = around_s(exchange.up, cluster.within, min(cluster.per_host, workers)) / 2
        hosts = np.arange(0, workers, cluster.per_host)
        together = np.maximum.reduceat(closed, hosts) + half_s
        told = from_driver(together, exchange.up, exchange.down, link)
        return np.full(workers, told[0] + half_s)
    if exchange.way == "group":
        parts, whole_s = exchange.buckets, own_s(exchange, cluster)
        first = closed - BACKWARD * step_s * (1 - 1 / parts)
        return np.full(workers, max(first.max() + whole_s, closed.max() + whole_s / parts))
    if workers == 1:
        return closed
    up_s, down_s = (
        each / link.bandwidth * cluster.per_host for each in (exchange.up, exchange.down)
    )
    if exchange.way == "neighbors":
        others = np.maximum(np.roll(closed, 1), np.roll(closed, -1))
        return np.maximum(closed, others) + 2 * link.latency + min(2, workers - 1) * up_s
    # v = 2 a + s + c v / (v + w): what is sent and received takes s; for the part of the time that
    # a host visits, it is visited, and for c of s both then send, or both receive.
    alone_s, work_s = 2 * link.latency + up_s + down_s, cluster.times.mean * exchange.period
    shared_s = 2 * up_s * down_s / max(up_s + down_s, 1e-300)
    half = (work_s - alone_s - shared_s) / 2
    return closed + math.sqrt(half**2 + alone_s * work_s) - half
