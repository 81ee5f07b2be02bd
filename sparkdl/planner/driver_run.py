"""Rounds in the driver in virtual time: the averager's own decisions, and links that take time.

What a worker sends passes the driver's link before it counts. A small contribution is buffered
while others are added; of a large one no more than the sockets hold passes before it is its turn,
in the order of ranks. Replies share the link equally. A worker that is lost comes back, and goes on
after its last committed window.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.planner.array_rounds import BUFFERED_BYTES
from sparkdl.planner.cluster import Cluster, Outcome, Stretch
from sparkdl.planner.exchanges import Exchange
from sparkdl.planner.virtual_run import VirtualRun

AT_ONCE = 1024
"""How many times are drawn together."""


NEVER = (math.inf, 0)


class Sum:
    """Contributions that are added in the order of ranks, one after the other.

    Args:
        add_s: seconds in which one passes the driver's link.

    Attributes:
        ends: when the one that is being added is complete; infinity if there is none.
    """

    def __init__(self, add_s: float) -> None:
        self.ends = math.inf
        self._add_s = add_s
        self._order: deque[int] = deque()
        self._ready: set[int] = set()
        self._skipped: set[int] = set()
        self._adding = -1

    def open(self, ranks: Sequence[int]) -> None:
        """Begin another sum."""
        self.ends, self._order = math.inf, deque(ranks)
        self._ready, self._skipped = set(), set()

    def add(self, rank: int, now: float) -> None:
        """Let a rank's contribution be added."""
        self._ready.add(rank)
        self._go_on(now)

    def skip(self, rank: int, now: float) -> None:
        """Do without a rank."""
        self._skipped.add(rank)
        self._go_on(now)

    def pop(self, now: float) -> int:
        """End what is complete at ``ends``; returns whose it is."""
        rank, self.ends = self._adding, math.inf
        self._go_on(now)
        return rank

    def _go_on(self, now: float) -> None:
        while self._order and self._order[0] in self._skipped:
            self._order.popleft()
        if math.isinf(self.ends) and self._order and self._order[0] in self._ready:
            self._adding, self.ends = self._order.popleft(), now + self._add_s


class SharedLink:
    """Transfers in one direction of a link, which share its bandwidth equally.

    Args:
        bandwidth: bytes a second.

    Attributes:
        ends: when the next one is complete; infinity if there is none.
    """

    def __init__(self, bandwidth: float) -> None:
        self.ends = math.inf
        self._bandwidth = bandwidth
        # Bytes that each transfer has had since the beginning, and what each of them ends at.
        self._served, self._at = 0.0, 0.0
        self._under_way: list[tuple[float, int, Any]] = []
        self._count = 0

    def add(self, now: float, octets: float, what: Any) -> None:
        """Begin a transfer."""
        self._advance(now)
        self._count += 1
        heapq.heappush(self._under_way, (self._served + octets, self._count, what))
        self._look()

    def pop(self) -> Any:
        """End the transfer that is complete at ``ends``."""
        now = self.ends
        self._advance(now)
        ends_at, _, what = heapq.heappop(self._under_way)
        self._served = ends_at  # exactly
        self._look()
        return what

    def _advance(self, now: float) -> None:
        if self._under_way:
            self._served += (now - self._at) * self._bandwidth / len(self._under_way)
        self._at = now

    def _look(self) -> None:
        if not self._under_way:
            self.ends = math.inf
            return
        missing = self._under_way[0][0] - self._served
        self.ends = self._at + max(missing, 0.0) * len(self._under_way) / self._bandwidth


class DriverRun(VirtualRun):
    """One epoch.

    Args:
        exchange: what is exchanged with the driver.
        cluster: by whom.
        windows: steps of each worker's windows.

    Attributes:
        outcome: what has happened so far.
    """

    def __init__(self, exchange: Exchange, cluster: Cluster, windows: Sequence[int]) -> None:
        super().__init__(exchange.policy(), cluster.workers)
        self.outcome = Outcome()
        self._exchange, self._cluster, self._windows = exchange, cluster, windows
        self._step_of = [0, *accumulate(windows)]
        self._window_of = {step: index for index, step in enumerate(self._step_of)}
        self._generator = np.random.default_rng(cluster.seed)
        self._slowness = cluster.slowness.tolist()
        self._drawn: dict[int, Iterator[float]] = {}
        self._up, self._down = (SharedLink(cluster.link.bandwidth) for _ in range(2))
        self._sum = Sum(exchange.up / cluster.link.bandwidth)
        self._losses = cluster.lost(self._generator)
        self._loss = next(self._losses, NEVER)
        self._back: list[tuple[float, int]] = []
        self._workers = [_Worker() for _ in range(cluster.workers)]
        self._finals: int | None = None

    @property
    def _is_buffered(self) -> bool:
        return self._exchange.up <= BUFFERED_BYTES

    def train(self, until: float = math.inf) -> Outcome:
        """Let the workers train until the epoch is over, or it is so late."""
        for rank in self.windows(until):
            worker, closed = self._workers[rank], self.now - self._cluster.link.latency
            self._note(rank, worker, closed)
            worker.closed = closed
            if self._is_buffered:
                self._up.add(self.now, self._exchange.up, self._members[rank])
            else:
                self._close(rank)
        outcome, exchange = self.outcome, self._exchange
        outcome.seconds = self.now + self._cluster.link.latency if math.isinf(until) else until
        outcome.rounds = len(self._windows)
        outcome.driver = outcome.windows * (exchange.up + exchange.down)
        outcome.sent = outcome.windows * max(exchange.up, exchange.down)
        return outcome

    def next_window(self, until: float) -> tuple[float, int] | None:
        """Pass the time until then with what links and lost workers do."""
        while self._finals != 0:
            due = self._due[0] if self._due else NEVER
            back = self._back[0] if self._back else NEVER
            first = min(due[0], back[0], self._loss[0], self._sum.ends, self._up.ends)
            first = min(first, self._down.ends)
            if first >= until:
                return None
            if first == due[0]:
                return heapq.heappop(self._due)
            self.now = first
            if first == self._sum.ends:
                self.tell(on.Contributed(self._members[self._sum.pop(first)]))
            elif first == self._up.ends:
                member = self._up.pop()
                if not member.gone:
                    self._close(member.rank)
            elif first == self._down.ends:
                self._passed(*self._down.pop())
            elif first == back[0]:
                heapq.heappop(self._back)
                self._join(self._members[back[1]])
            else:
                self._lose(self._loss[1])
                self._loss = next(self._losses, NEVER)
        return None

    def decided(self, decisions: Sequence[do.Decision]) -> None:
        """Count what is committed, and follow the sum."""
        for decision in decisions:
            if isinstance(decision, do.Report):
                self._reported(decision.event)
            elif isinstance(decision, do.OpenSum):
                self._sum.open(decision.ranks)
            elif isinstance(decision, do.Skip):
                self._sum.skip(decision.rank, self.now)

    def _reported(self, event: object) -> None:
        if isinstance(event, EpochSummary):
            self._finals = 0
        elif isinstance(event, WindowReport):
            outcome = self.outcome
            self._workers[event.rank].committed = self._window_of[event.step]
            outcome.windows += 1
            outcome.staleness += event.staleness
            outcome.most_stale = max(outcome.most_stale, event.staleness)

    def receive(self, member: on.Member) -> None:
        """A contribution is added once it is its turn."""
        if self._is_buffered:
            self.tell(on.Contributed(member))
        else:
            self._sum.add(member.rank, self.now)

    def start_over(self, members: Sequence[on.Member]) -> None:
        """They still have what they have contributed."""
        self._sum.open(())
        for member in members:
            self._close(member.rank)

    def send(self, member: on.Member, *, final: bool) -> None:
        """Replies share the link; what is buffered of one does not keep the averager waiting."""
        if final:
            self._finals = (self._finals or 0) + 1
        if self._workers[member.rank].closed is None and not member.attempt:
            self.begin(member.rank)  # with the center that everyone has
            self.tell(on.Taken(member))
            return
        self._workers[member.rank].answered = self.now
        octets = self._exchange.down * (self._exchange.fragments if final else 1)
        unbuffered = octets - BUFFERED_BYTES
        if unbuffered > 0:
            self._down.add(self.now, unbuffered, (member, final, BUFFERED_BYTES))
        else:
            self._down.add(self.now, octets, (member, final, 0))
            self.tell(on.Taken(member))

    def _passed(self, member: on.Member, final: bool, more: int) -> None:
        if more and not member.gone:
            self._down.add(self.now, more, (member, final, 0))
            self.tell(on.Taken(member))
            return
        if final and self._finals:
            self._finals -= 1
        if member.gone:
            return
        if not final:
            self.begin(member.rank)
            return
        worker, arrived = self._workers[member.rank], self.now + self._cluster.link.latency
        worker.computed, worker.stood = 0.0, arrived - (worker.closed or 0.0)
        worker.received_s = arrived - worker.answered
        self._note(member.rank, worker, arrived)

    def begun(self, rank: int) -> float:
        """When what a worker trains next reaches the driver."""
        worker, latency = self._workers[rank], self._cluster.link.latency
        if worker.committed == len(self._windows):
            return self.now + latency  # it has nothing left to train, and says so
        steps = self._windows[worker.committed]
        arrived = self.now + latency if worker.closed is not None or self.now else 0.0
        overlap = 0 if worker.closed is None else min(self._exchange.overlap, steps)
        head, tail = self._draw(rank, overlap), self._draw(rank, steps - overlap)
        before = arrived if worker.closed is None else worker.closed
        goes_on = max(before + head, arrived)
        worker.computed = head + tail
        worker.stood = goes_on - before - head
        worker.received_s = 0.0 if worker.closed is None else arrived - worker.answered
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
        return seconds * self._slowness[rank]

    def _close(self, rank: int) -> None:
        """Report the window that a worker has ended."""
        index = self._workers[rank].committed
        last = min(index + 1, len(self._windows))
        report = WindowReport(
            rank=rank,
            epoch=1,
            step=self._step_of[last],
            examples=self._step_of[last] - self._step_of[index],
            loss_sum=0.0,
            last=last == len(self._windows),
            step_of_epoch=self._step_of[last],
        )
        self.close(report)

    def _note(self, rank: int, worker: _Worker, until: float) -> None:
        """Count what a worker has done since it closed its window before."""
        outcome, sent_s = self.outcome, self._exchange.up / self._cluster.link.bandwidth
        carried = min(worker.stood, sent_s + worker.received_s)
        did = worker.computed, worker.stood - carried, carried
        outcome.computed += did[0]
        outcome.waited += did[1]
        outcome.exchanged += did[2]
        before = until - worker.computed - worker.stood
        outcome.stretches.append(Stretch(before, until, did, rank // self._cluster.ranks_a_lane))

    def _lose(self, rank: int) -> None:
        """A worker dies, unless it is away already; another attempt comes later."""
        member = self._members[rank]
        if member.gone or any(rank == each for _, each in self._back):
            return
        self.outcome.lose(self.now, rank)
        self._due = [due for due in self._due if due[1] != rank]
        heapq.heapify(self._due)
        self._workers[rank].closed = None
        self.tell(on.Lost(member, "was lost"))
        self._members[rank] = on.Member(rank, "host", attempt=member.attempt + 1)
        heapq.heappush(self._back, (self.now + self._cluster.restart_s, rank))


@dataclass(slots=True)
class _Worker:
    """What is known of one worker.

    Attributes:
        closed: when it closed its last window; None if it has yet to close one since it joined.
        committed: windows that count.
        computed: seconds that it computes in the window under way.
        stood: seconds that it stands still in it.
        answered: when the driver began to send it what it received last.
        received_s: seconds that it took to receive that.
    """

    closed: float | None = None
    committed: int = 0
    computed: float = 0.0
    stood: float = 0.0
    answered: float = 0.0
    received_s: float = 0.0
