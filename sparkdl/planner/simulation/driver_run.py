"""Rounds in the driver in virtual time: the averager's own decisions, and links that take time.

What a worker sends passes the driver's link before it counts. A small contribution is buffered
while others are added; of a large one no more than the sockets hold passes before it is its turn,
in the order of ranks. Replies share the link equally. A worker that is lost comes back, and goes on
after its last committed window.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from sparkdl.averager.coordination.actions import Actions, carry_out
from sparkdl.averager.coordination.coordinator import Coordinator, Event, P
from sparkdl.averager.coordination.membership import Member, Tolerance
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.messages.run_events import RunEvent
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.planner.simulation.array_rounds import BUFFERED_BYTES, own_s
from sparkdl.planner.simulation.cluster import NEVER, Cluster, Epoch, Note
from sparkdl.planner.simulation.exchanges import Exchange

SILENT = logging.getLogger(f"{__name__}.silent")
"""For losses, which are simulated by the hundred."""
SILENT.addHandler(logging.NullHandler())
SILENT.propagate = False
FOREVER_S = 1e15
"""A deadline that no simulated worker misses."""
AT_ONCE = 1024
"""How many times are drawn together."""


class SharedLink:
    """Transfers in one direction of a link, which share its bandwidth equally: replies.

    Args:
        bandwidth: bytes a second.

    Attributes:
        ends: when the next one is complete; infinity if there is none.
    """

    def __init__(self, bandwidth: float) -> None:
        self.ends = math.inf
        self._bandwidth = bandwidth
        # Bytes that each transfer has had since the beginning, as of a time.
        self._served = self._at = 0.0
        self._under_way: list[tuple[float, int, Any]] = []
        self._count = 0

    def add(self, now: float, octets: float, what: Any) -> None:
        """Begin a transfer."""
        if self._under_way:
            self._served += (now - self._at) * self._bandwidth / len(self._under_way)
        self._count += 1
        heapq.heappush(self._under_way, (self._served + octets, self._count, what))
        self._look(now)

    def pop(self) -> Any:
        """End the transfer that is complete at ``ends``."""
        self._served, _, what = heapq.heappop(self._under_way)
        self._look(self.ends)
        return what

    def _look(self, now: float) -> None:
        self._at, self.ends = now, math.inf
        if self._under_way:
            missing = max(0.0, self._under_way[0][0] - self._served)
            self.ends = now + missing * len(self._under_way) / self._bandwidth


class Sum:
    """Contributions that pass the driver's link and are added, one after the other.

    Args:
        add_s: seconds that one takes.
        in_order: whether a rank waits for all before it; otherwise it is buffered.

    Attributes:
        ends: when the one that is being added is complete; infinity if there is none.
    """

    def __init__(self, add_s: float, *, in_order: bool) -> None:
        self._add_s, self._in_order = add_s, in_order
        self.open(())

    def open(self, ranks: Sequence[int]) -> None:
        """Begin another sum."""
        self.ends, self._adding, self._order = math.inf, -1, deque(ranks)
        self._ready: dict[int, None] = {}
        self._skipped: set[int] = set()

    def add(self, rank: int, now: float) -> None:
        """Let a rank's contribution be added."""
        self._ready[rank] = None
        self.go_on(now)

    def skip(self, rank: int, now: float) -> None:
        """Do without a rank."""
        self._skipped.add(rank)
        self.go_on(now)

    def pop(self) -> int:
        """End what is complete at ``ends``; returns whose it is."""
        rank, now, self.ends = self._adding, self.ends, math.inf
        self.go_on(now)
        return rank

    def go_on(self, now: float) -> None:
        """Begin to add the next contribution, if it may be added."""
        while self._order and self._order[0] in self._skipped:
            self._order.popleft()
        queue = self._order if self._in_order else self._ready
        first = next(iter(queue), None)
        if math.isinf(self.ends) and first in self._ready:
            del self._ready[first]
            if self._in_order:
                self._order.popleft()
            self._adding, self.ends = first, now + self._add_s


@dataclass(slots=True)
class _Worker:
    """What is known of one worker.

    Attributes:
        closed: when it closed its last window; None if it has yet to close one since it joined.
        committed: windows that count.
        computed: seconds that it computes in the window under way.
        stood: seconds that it stands still in it.
    """

    closed: float | None = None
    committed: int = 0
    computed: float = 0.0
    stood: float = 0.0


class DriverRun(Actions):
    """One epoch, by the averager's own decisions, without values.

    Args:
        exchange: what is exchanged with the driver.
        cluster: by whom.
        windows: steps of each worker's windows.
        note: told what each worker does.

    Attributes:
        epoch: what it comes to so far.
        now: the time, in seconds.
        steps: windows that each worker has ended.
    """

    def __init__(
        self,
        exchange: Exchange,
        cluster: Cluster,
        windows: Sequence[int],
        note: Note | None = None,
    ) -> None:
        self.now = 0.0
        self.steps = [0] * cluster.workers
        self._coordinator = Coordinator(
            RunSpec(
                world_size=cluster.workers,
                deadline_s=FOREVER_S,
                tolerance=Tolerance(max_failures=1 << 60),
                policy=exchange.policy(),
            ),
            0.0,
        )
        self._coordinator.log = SILENT
        self._members = [Member(rank, "host") for rank in range(cluster.workers)]
        self._due: list[tuple[float, int]] = []
        self.epoch = Epoch(strategy=exchange.name, rounds=len(windows))
        self._exchange, self._cluster, self._windows = exchange, cluster, windows
        self._note = note
        self._steps = [0, *accumulate(windows)]
        self._generator = np.random.default_rng(cluster.seed)
        self._slowness = cluster.slowness.tolist()
        self._drawn: dict[int, Iterator[float]] = {}
        self._replies = SharedLink(cluster.link.bandwidth)
        in_order = exchange.up > BUFFERED_BYTES
        self._sum = Sum(exchange.up / cluster.link.bandwidth, in_order=in_order)
        self._losses = cluster.lost(self._generator)
        self._loss = next(self._losses)
        self._back: list[tuple[float, int]] = []
        self._again: list[int] = []
        self._workers = [_Worker() for _ in range(cluster.workers)]
        self._finals: int | None = None
        self._sent = self._received = 0.0
        self._own_s = own_s(exchange, cluster)

    def train(self, until: float = math.inf) -> Epoch:
        """Let the workers train until the epoch is over, or it is so late."""
        for member in self._members:
            self._join(member)
        self._tell(self._coordinator.start)
        while (window := self._next_window(until)) is not None:
            self.now, rank = window
            self.steps[rank] += 1
            worker, closed = self._workers[rank], self.now - self._cluster.link.latency
            self._count(rank, closed)
            worker.closed = closed
            self._close(rank)
        epoch = self.epoch
        epoch.lasted = self.now + self._cluster.link.latency if math.isinf(until) else until
        epoch.driver = self._sent + self._received
        epoch.sent = max(self._sent, self._received)
        return epoch

    def _next_window(self, until: float) -> tuple[float, int] | None:
        """Pass the time until then with what links and lost workers do."""
        while self._finals != 0:
            while self._again:
                self._close(self._again.pop(0))  # it still has what it has contributed
            due = self._due[0] if self._due else NEVER
            back = self._back[0] if self._back else NEVER
            first = min(due[0], back[0], self._loss[0], self._sum.ends, self._replies.ends)
            if first >= until:
                break
            if first == due[0]:
                return heapq.heappop(self._due)
            self.now = first
            if first == self._sum.ends:
                self._tell(self._coordinator.contributed, self._members[self._sum.pop()])
            elif first == self._replies.ends:
                self._passed(*self._replies.pop())
            elif first == back[0]:
                heapq.heappop(self._back)
                self._join(self._members[back[1]])
            else:
                self._lose(self._loss[1])
                self._loss = next(self._losses)
        return None

    def _tell(self, event: Event[P], *arguments: P.args, **options: P.kwargs) -> None:
        """Have the coordinator decide, and do what it says."""
        carry_out(event(self.now, *arguments, **options), self)

    def _join(self, member: Member) -> None:
        self._tell(self._coordinator.joined, member)
        self._tell(self._coordinator.rows_found, member, ShardStatistics(1, ()))

    def open_sum(self, ranks: tuple[int, ...]) -> None:
        """Follow the sum."""
        self._sum.open(ranks)

    def skip(self, rank: int) -> None:
        """Do without a rank."""
        self._sum.skip(rank, self.now)

    def start_over(self, members: tuple[Member, ...]) -> None:
        """Have workers contribute again what they still have."""
        self._sum.open(())
        self._again += [member.rank for member in members]

    def report(self, event: RunEvent) -> None:
        """Count what is committed."""
        if isinstance(event, EpochSummary):
            self._finals = 0
        elif isinstance(event, WindowReport):
            worker = self._workers[event.rank]
            worker.committed = min(worker.committed + 1, len(self._windows))
            self.epoch.windows += 1
            self.epoch.staleness += event.staleness
            self.epoch.max_staleness = max(self.epoch.max_staleness, event.staleness)

    def receive(self, member: Member, weight: float, staleness: int) -> None:
        """A contribution is added once it is its turn."""
        self._sent += self._exchange.up
        self._sum.add(member.rank, self.now)

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
        if self._workers[member.rank].closed is None and not member.attempt:
            self._begin(member.rank)  # with the center that everyone has
            self._tell(self._coordinator.taken, member)
            return
        octets = self._exchange.down
        if final and self._exchange.final is not None:
            octets = self._exchange.final
        self._received += octets
        if octets > BUFFERED_BYTES:
            self._replies.add(self.now, octets - BUFFERED_BYTES, (member, final, BUFFERED_BYTES))
        else:
            self._replies.add(self.now, octets, (member, final, 0))
            self._tell(self._coordinator.taken, member)

    def _passed(self, member: Member, final: bool, more: int) -> None:
        if more and not member.gone:
            self._replies.add(self.now, more, (member, final, 0))
            self._tell(self._coordinator.taken, member)
            return
        if final and self._finals:
            self._finals -= 1
        if final and not member.gone:
            worker, arrived = self._workers[member.rank], self.now + self._cluster.link.latency
            worker.computed, worker.stood = 0.0, arrived - (worker.closed or 0.0)
            self._count(member.rank, arrived)
        elif not member.gone:
            self._begin(member.rank)

    def _begin(self, rank: int) -> None:
        """A worker begins its next window."""
        heapq.heappush(self._due, (self._begun(rank), rank))

    def _begun(self, rank: int) -> float:
        """When what a worker trains next reaches the driver."""
        worker, latency = self._workers[rank], self._cluster.link.latency
        arrived = self.now + latency if self.now else 0.0
        if worker.committed == len(self._windows):
            worker.computed = worker.stood = 0.0
            return arrived + latency  # it has nothing left to train, and says so
        steps = self._windows[worker.committed]
        closed, overlap = arrived, 0
        if worker.closed is not None:
            closed, overlap = worker.closed, min(self._exchange.overlap, steps)
        head, tail = self._draw(rank, overlap), self._draw(rank, steps - overlap)
        goes_on = max(closed + head, arrived)
        worker.computed, worker.stood = head + tail, goes_on - closed - head
        return goes_on + tail + latency

    def _draw(self, rank: int, steps: int) -> float:
        """Seconds of so many steps."""
        if not steps:
            return 0.0
        seconds = next(self._drawn.get(steps, iter(())), None)
        if seconds is None:
            drawn = self._cluster.times.draw(self._generator, steps, AT_ONCE)
            self._drawn[steps] = iter(drawn.tolist())
            seconds = next(self._drawn[steps])
        return seconds * float(self._slowness[rank])

    def _close(self, rank: int) -> None:
        """Report the window that a worker has ended."""
        index, windows = self._workers[rank].committed, len(self._windows)
        step = self._steps[min(index + 1, windows)]
        # Fragments are sent without training too; who has nothing left sends nothing.
        sends = index < windows and self._exchange.fragments > 1
        report = WindowReport(
            rank=rank,
            epoch=1,
            step=step,
            examples=step - self._steps[index] or int(sends),
            loss_sum=0.0,
            last=index + 1 >= windows,
            step_of_epoch=step,
        )
        self._tell(self._coordinator.window_closed, self._members[rank], report)

    def _count(self, rank: int, until: float) -> None:
        """Count what a worker has done since it closed its window before."""
        worker = self._workers[rank]
        carried = min(worker.stood, self._own_s)
        did = np.array([worker.computed, worker.stood - carried, carried])
        self.epoch.did += did
        if self._note is not None:
            began = until - worker.computed - worker.stood
            self._note(began, until, did, rank // self._cluster.ranks_a_lane)

    def _lose(self, rank: int) -> None:
        """A worker dies, unless it is away already; another attempt comes later."""
        member = self._members[rank]
        if any(rank == each for _, each in self._back):
            return
        self.epoch.lost.append((self.now, rank))
        self._due = [due for due in self._due if due[1] != rank]
        heapq.heapify(self._due)
        self._workers[rank].closed = None
        self._tell(self._coordinator.lost, member, "was lost")
        self._members[rank] = Member(rank, "host", attempt=member.attempt + 1)
        heapq.heappush(self._back, (self.now + self._cluster.restart_s, rank))
