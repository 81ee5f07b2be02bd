"""Rounds in the driver in virtual time: the averager's own decisions, and links that take time.

What a worker sends passes the driver's link before it counts. A small contribution is buffered
while others are added; of a large one no more than the sockets hold passes before it is its turn,
in the order of ranks. Replies share the link equally.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from sparkdl.averager.coordination.actions import Actions, Event, P, carry_out
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.run_events import RunEvent
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import ShardStatistics
from sparkdl.planner.simulation.array_rounds import BUFFERED_BYTES, own_s
from sparkdl.planner.simulation.cluster import Cluster, Epoch
from sparkdl.planner.simulation.engine import Clock, SharedLink, Sum
from sparkdl.planner.simulation.exchanges import Exchange

FOREVER_S = 1e15
"""A deadline that no simulated worker misses."""


@dataclass(eq=False)
class DriverRun(Actions):
    """One epoch, by the averager's own decisions, without values.

    Attributes:
        exchange: what is exchanged with the driver.
        cluster: by whom.
        windows: steps of each worker's windows.
        epoch: what it comes to so far.
        steps: windows that each worker has ended.
    """

    exchange: Exchange
    cluster: Cluster
    windows: Sequence[int]

    def __post_init__(self) -> None:
        exchange, cluster = self.exchange, self.cluster
        self.epoch = Epoch(strategy=exchange.name, rounds=len(self.windows))
        self.steps = [0] * cluster.workers
        self._coordinator = Coordinator(
            RunSpec(world_size=cluster.workers, deadline_s=FOREVER_S, policy=exchange.policy()),
            0.0,
        )
        self._members = [Member(rank, "host") for rank in range(cluster.workers)]
        # When each closed its last window; None of one that has yet to close one.
        self._closed: list[float | None] = [None] * cluster.workers
        self._committed = [0] * cluster.workers
        self._steps = [0, *accumulate(self.windows)]
        self._generator = np.random.default_rng(cluster.seed)
        self._slowness = cluster.slowness
        self._finals: int | None = None
        self._own_s = own_s(exchange, cluster)
        self._clock, bandwidth = Clock(), cluster.link.bandwidth
        self._replies = SharedLink(self._clock, bandwidth)
        in_order = exchange.up > BUFFERED_BYTES
        self._sum = Sum(self._clock, exchange.up / bandwidth, self._added, in_order=in_order)

    def train(self, until: float = math.inf) -> Epoch:
        """Let the workers train until the epoch is over, or it is so late."""
        for member in self._members:
            self._tell(self._coordinator.joined, member)
            self._tell(self._coordinator.rows_found, member, ShardStatistics(1, ()))
        self._tell(self._coordinator.start)
        while self._finals != 0 and self._clock.step(until):
            pass
        epoch, ended = self.epoch, self._clock.now + self.cluster.link.latency
        epoch.lasted = ended if math.isinf(until) else until
        return epoch

    def _tell(self, event: Event[P], *arguments: P.args, **options: P.kwargs) -> None:
        """Have the coordinator decide, and do what it says."""
        carry_out(event(self._clock.now, *arguments, **options), self)

    def _added(self, rank: int) -> None:
        self._tell(self._coordinator.contributed, self._members[rank])

    def open_sum(self, ranks: tuple[int, ...]) -> None:
        """Follow the sum."""
        self._sum.open(ranks)

    def skip(self, rank: int) -> None:
        """Do without a rank."""
        self._sum.skip(rank)

    def report(self, event: RunEvent) -> None:
        """Count what is committed."""
        if isinstance(event, EpochSummary):
            self._finals = 0
        elif isinstance(event, WindowReport):
            committed = self._committed[event.rank] + 1
            self._committed[event.rank] = min(committed, len(self.windows))
            self.epoch.windows += 1
            self.epoch.staleness += event.staleness
            self.epoch.max_staleness = max(self.epoch.max_staleness, event.staleness)

    def receive(self, member: Member, weight: float, staleness: int) -> None:
        """A contribution is added once it is its turn."""
        self._sum.add(member.rank)

    def reply(self, member: Member, *, final: bool, values: bool, worker_state: bool) -> None:
        """Send a worker the result of its round."""
        self._send(member, final=final)

    def welcome(self, member: Member) -> None:
        """Send a worker the center."""
        self._send(member, final=False)

    def _send(self, member: Member, *, final: bool) -> None:
        """Replies share the link; what is buffered of one does not keep the averager waiting."""
        if final:
            self._finals = (self._finals or 0) + 1
        if self._closed[member.rank] is None:
            self._begin(member)  # with the center that everyone has
            self._tell(self._coordinator.taken, member)
            return
        octets = self.exchange.down
        if final and self.exchange.final is not None:
            octets = self.exchange.final
        arrive = partial(self._arrive, member, final=final)

        def buffer() -> None:
            self._replies.add(min(octets, BUFFERED_BYTES), arrive)
            self._tell(self._coordinator.taken, member)

        if octets > BUFFERED_BYTES:
            self._replies.add(octets - BUFFERED_BYTES, buffer)
        else:
            buffer()

    def _arrive(self, member: Member, *, final: bool) -> None:
        """All of a reply has passed."""
        if final and self._finals:
            self._finals -= 1
        if not final:
            self._begin(member)
            return
        arrived = self._clock.now + self.cluster.link.latency
        self.epoch.count(0.0, arrived - (self._closed[member.rank] or 0.0), self._own_s)

    def _end(self, member: Member, computed: float, stood: float) -> None:
        """What a worker has trained has reached the driver, with the report of its window."""
        self.steps[member.rank] += 1
        self.epoch.count(computed, stood, self._own_s)
        self._closed[member.rank] = self._clock.now - self.cluster.link.latency
        index, windows = self._committed[member.rank], len(self.windows)
        step = self._steps[min(index + 1, windows)]
        # Fragments are sent without training too; who has nothing left sends nothing.
        sends = index < windows and self.exchange.fragments > 1
        report = WindowReport(
            rank=member.rank,
            epoch=1,
            step=step,
            examples=step - self._steps[index] or int(sends),
            loss_sum=0.0,
            last=index + 1 >= windows,
            step_of_epoch=step,
        )
        self._tell(self._coordinator.window_closed, member, report)

    def _begin(self, member: Member) -> None:
        """A worker has the center, and begins its next window."""
        rank, latency = member.rank, self.cluster.link.latency
        arrived = self._clock.now + latency * bool(self._clock.now)
        computed, stood, ended = 0.0, 0.0, arrived
        if self._committed[rank] < len(self.windows):  # else it has nothing left, and says so
            steps, closed = self.windows[self._committed[rank]], self._closed[rank]
            overlap = 0 if closed is None else min(self.exchange.overlap, steps)
            head, tail = self._draw(rank, overlap), self._draw(rank, steps - overlap)
            began = arrived if closed is None else closed
            goes_on = max(began + head, arrived)
            computed, stood, ended = head + tail, goes_on - began - head, goes_on + tail
        self._clock.at(ended + latency, partial(self._end, member, computed, stood))

    def _draw(self, rank: int, steps: int) -> float:
        """Seconds of so many steps."""
        if not steps:
            return 0.0
        (seconds,) = self.cluster.times.draw(self._generator, steps, 1)
        return float(seconds * self._slowness[rank])
