"""Workers that have joined but are not let in yet: the driver has to check their rows first.

Where rows keep arriving while a worker trains, it waits for the driver to check those too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.committed import CommittedProgress
from sparkdl.averager.coordination.events import Member
from sparkdl.averager.coordination.membership import Membership
from sparkdl.averager.coordination.shards import Shards
from sparkdl.averager.messages.progress import Position
from sparkdl.averager.messages.run_events import NewRows
from sparkdl.errors import TrainingError
from sparkdl.feed.statistics.shards import ShardStatistics


class Arrivals:
    """The workers between joining and their first window.

    Args:
        members: who is in the run.
        shards: what the workers found in their rows.
        committed: how far the training has come.
        resumed: whether the training resumes from a checkpoint, which may belong to other rows.
        decide: called with what is to be done, in order.

    Attributes:
        started: whether the driver has let the workers train.
        ready: the workers that have read their rows and wait to be let in, by rank.
        shown: the workers that wait for the driver to check rows, by rank.
    """

    def __init__(
        self,
        members: Membership,
        shards: Shards,
        committed: CommittedProgress,
        *,
        resumed: bool,
        decide: Callable[[do.Decision], None],
    ) -> None:
        self.started = False
        self.ready: dict[int, Member] = {}
        self.shown: dict[int, Member] = {}
        self._members = members
        self._shards = shards
        self._committed = committed
        self._resumed = resumed
        self._decide = decide

    @property
    def knocking(self) -> Mapping[int, Member]:
        """The workers to be let in as soon as no sum is under way, by rank."""
        return self.ready if self.started else {}

    def read(self, event: on.RowsFound) -> bool:
        """Take what a worker found before it is let in; returns whether it is ready."""
        member, shard = event.member, event.shard
        self._shards.row_servers[member.rank] = event.row_server
        begins = not self._resumed and self._committed.positions[member.rank] == Position()
        if not shard.complete and not begins:
            self._decide(do.ReadOn(member))
            return False
        self._note(member.rank, shard)
        self.ready[member.rank] = member
        return True

    def show(self, event: on.RowsFound) -> None:
        """Have the driver check rows that a worker has found since it was let in.

        Raises:
            TrainingError: the worker has said that there are no more.
        """
        rank = event.member.rank
        if not self._members.reads(rank):
            raise TrainingError(f"rank {rank} reported its rows twice")
        self._note(rank, event.shard)
        self.shown[rank] = event.member
        self._decide(do.Report(NewRows(rank, event.shard)))

    def approve(self, rank: int, now: float) -> None:
        """Let a worker train on the rows that the driver has checked."""
        member = self.shown.pop(rank, None)
        if member is not None:
            self._members.note_heartbeat(rank, now)
            self._decide(do.GoOn(member))

    def expect(self, now: float) -> None:
        """Restart the time within which workers have to join."""
        if self._members.joined < self._members.world_size:
            for rank in self._members.everyone - self._members.there:
                self._members.note_heartbeat(rank, now)

    def lose(self, rank: int) -> None:
        """Remove a worker that was lost."""
        self.ready.pop(rank, None)
        self.shown.pop(rank, None)

    def _note(self, rank: int, shard: ShardStatistics) -> None:
        news = self._shards.note(rank, shard)
        self._members.note_reading(rank, reading=not shard.complete)
        if news is not None:
            self._decide(do.Report(news))
