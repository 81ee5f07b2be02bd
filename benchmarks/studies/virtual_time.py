"""The averager's decisions on workers that train in virtual time, without links or values."""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.policies.round_policy import RoundPolicy
from sparkdl.events import WindowReport
from sparkdl.feed.statistics.shards import ShardStatistics


class VirtualRun(ABC):
    """One training.

    Args:
        policy: who is waited for.
        workers: how many.

    Attributes:
        now: the time.
        steps: windows that each worker has ended.
    """

    def __init__(self, policy: RoundPolicy, workers: int) -> None:
        self.now = 0.0
        self.steps = [0] * workers
        self._coordinator = Coordinator(
            RunSpec(world_size=workers, deadline_s=1e9, policy=policy), 0.0
        )
        self._members = [on.Member(rank, "host") for rank in range(workers)]
        self._due: list[tuple[float, int]] = []

    @abstractmethod
    def begun(self, rank: int) -> float:
        """A worker was sent the center; returns when it will have ended its window."""

    @abstractmethod
    def decided(self, decisions: Sequence[do.Decision]) -> None:
        """Take note of what was decided; workers are told of it afterwards."""

    def windows(self, until: float = math.inf) -> Iterator[int]:
        """Begin, and yield who ends a window, whose report then has to be closed."""
        for member in self._members:
            self._tell(on.Joined(member))
            self._tell(on.RowsFound(member, ShardStatistics(1, ())))
        self._tell(on.Started())
        while self._due[0][0] < until:
            self.now, rank = heapq.heappop(self._due)
            self.steps[rank] += 1
            yield rank

    def close(self, report: WindowReport) -> None:
        """A worker contributes."""
        self._tell(on.WindowClosed(self._members[report.rank], report))

    def _tell(self, event: on.Event) -> None:
        decisions = self._coordinator.handle(event, self.now)
        self.decided(decisions)
        for decision in decisions:
            if isinstance(decision, do.Receive):
                self._tell(on.Contributed(decision.member))
            elif isinstance(decision, (do.Reply, do.Welcome)):
                rank = decision.member.rank
                heapq.heappush(self._due, (self.begun(rank), rank))
                self._tell(on.Taken(decision.member))
