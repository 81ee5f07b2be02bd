"""The averager's own decisions on workers that train in virtual time, without values."""

from __future__ import annotations

import heapq
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.policies.round_policy import RoundPolicy
from sparkdl.events import WindowReport
from sparkdl.feed.statistics.shards import ShardStatistics

SILENT = logging.getLogger(f"{__name__}.silent")
"""For losses, which are simulated by the hundred."""
SILENT.addHandler(logging.NullHandler())
SILENT.propagate = False
FOREVER_S = 1e15
"""A deadline that no simulated worker misses."""


class VirtualRun(ABC):
    """One training, whose links take no time unless ``receive`` and ``send`` say otherwise.

    Args:
        policy: who is waited for.
        workers: how many.

    Attributes:
        now: the time, in seconds.
        steps: windows that each worker has ended.
    """

    def __init__(self, policy: RoundPolicy, workers: int) -> None:
        self.now = 0.0
        self.steps = [0] * workers
        self._coordinator = Coordinator(
            RunSpec(
                world_size=workers,
                deadline_s=FOREVER_S,
                tolerance=Tolerance(max_failures=1 << 60),
                policy=policy,
            ),
            0.0,
        )
        self._coordinator.log = SILENT
        self._members = [on.Member(rank, "host") for rank in range(workers)]
        self._due: list[tuple[float, int]] = []

    @abstractmethod
    def begun(self, rank: int) -> float:
        """A worker was sent the center; returns when it will have ended its window."""

    def decided(self, decisions: Sequence[do.Decision]) -> None:  # noqa: B027 - not all have to know
        """Take note of what was decided; workers are told of it afterwards."""

    def windows(self, until: float = math.inf) -> Iterator[int]:
        """Begin, and yield who ends a window, whose report then has to be closed."""
        for member in self._members:
            self._join(member)
        self.tell(on.Started())
        while (event := self.next_window(until)) is not None:
            self.now, rank = event
            self.steps[rank] += 1
            yield rank

    def next_window(self, until: float) -> tuple[float, int] | None:
        """When the next window ends, and whose; None if that is not before ``until``."""
        if not self._due or self._due[0][0] >= until:
            return None
        return heapq.heappop(self._due)

    def close(self, report: WindowReport) -> None:
        """A worker contributes."""
        self.tell(on.WindowClosed(self._members[report.rank], report))

    def tell(self, event: on.Event) -> None:
        """Have the coordinator decide, and do what it says."""
        decisions = self._coordinator.handle(event, self.now)
        self.decided(decisions)
        for decision in decisions:
            self.follow(decision)

    def follow(self, decision: do.Decision) -> None:
        """Do what a decision says."""
        if isinstance(decision, do.Receive):
            self.receive(decision.member)
        elif isinstance(decision, do.Reply):
            self.send(decision.member, final=decision.final)
        elif isinstance(decision, do.Welcome):
            self.send(decision.member, final=False)

    def receive(self, member: on.Member) -> None:
        """A contribution may come in: it is there at once."""
        self.tell(on.Contributed(member))

    def send(self, member: on.Member, *, final: bool) -> None:
        """A worker is sent the center, an epoch's ``final`` one or another: it has it at once."""
        self.begin(member.rank)
        self.tell(on.Taken(member))

    def begin(self, rank: int) -> None:
        """A worker begins its next window."""
        heapq.heappush(self._due, (self.begun(rank), rank))

    def _join(self, member: on.Member) -> None:
        self.tell(on.Joined(member))
        self.tell(on.RowsFound(member, ShardStatistics(1, ())))
