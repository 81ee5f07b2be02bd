"""Where each worker of a run stands: one state per rank, and one table of what may follow what.

A change that the table does not have ends the run: only bugs in a strategy, or a worker that runs
other code, get that far. docs/architecture.md shows the table.

What the ranks report of their rows, and what they exchange through the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.run_events import WorkerState
from sparkdl.errors import DataError, TrainingError
from sparkdl.events import WindowReport
from sparkdl.feed.shards import DataStatistics, ShardStatistics

if TYPE_CHECKING:
    from sparkdl.averager.coordination.run_state import RunState


@dataclass(slots=True)
class Window:
    """A window that a worker has closed, and contributes.

    It is not frozen only because it takes four times as long to make one that is.

    Attributes:
        member: the worker.
        report: what it has trained on.
        kept: what to keep of it in case all restart from this round; None for nothing.
        takes_reply: whether it wants the result.
    """

    member: Member
    report: WindowReport
    kept: WorkerState | None = None
    takes_reply: bool = True


class RankState(Enum):
    """Where a rank's worker stands."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and this is asked in each event

    AWAY = "away"
    """Has yet to join, or was lost."""
    READING = "reading"
    """Has joined, and has yet to report enough of its rows."""
    READY = "ready"
    """Waits to be let in."""
    RECEIVING = "receiving"
    """Is being sent a center, which the next sum must not overwrite."""
    TRAINING = "training"
    CLOSED = "closed"
    """Is about to contribute, and waits until the sum may be added to."""
    CONTRIBUTING = "contributing"
    CONTRIBUTED = "contributed"
    """Its contribution is in the sum, and the round goes on."""
    AT_BARRIER = "at barrier"
    """Its window is committed; it waits for the center until the policy lets it go on."""
    THROUGH = "through"
    """Its last window of the epoch is committed; it waits for the epoch's final center."""
    FINISHED = "finished"
    """Has trained its last epoch."""


BEFORE: Mapping[RankState, frozenset[RankState]] = {
    RankState.READING: frozenset({RankState.AWAY}),
    RankState.READY: frozenset({RankState.READING, RankState.READY}),  # again: of all its rows
    RankState.RECEIVING: frozenset({RankState.READY, RankState.AT_BARRIER, RankState.THROUGH}),
    # After a round that starts over, it contributes the same again.
    RankState.TRAINING: frozenset(
        {RankState.RECEIVING, RankState.CONTRIBUTING, RankState.CONTRIBUTED}
    ),
    # It may close a window before the averager knows that it has received all of the center.
    RankState.CLOSED: frozenset({RankState.RECEIVING, RankState.TRAINING}),
    RankState.CONTRIBUTING: frozenset({RankState.CLOSED}),
    RankState.CONTRIBUTED: frozenset({RankState.CONTRIBUTING}),
    RankState.AT_BARRIER: frozenset({RankState.CONTRIBUTED}),
    RankState.THROUGH: frozenset({RankState.CONTRIBUTED}),
    # One that was dropped may finish: its last message was on its way.
    RankState.FINISHED: frozenset({RankState.AWAY, RankState.RECEIVING, RankState.TRAINING}),
    RankState.AWAY: frozenset(RankState) - {RankState.AWAY, RankState.FINISHED},
}
"""By state: those that a rank may come from."""
NOT_ADMITTED = frozenset({RankState.AWAY, RankState.READING, RankState.READY})
"""The states of those who have not been let in."""
NOT_ACTIVE = NOT_ADMITTED | {RankState.THROUGH}
"""The states of those who do not train in the epoch under way."""
WITH_WINDOW = frozenset(
    {
        RankState.CLOSED,
        RankState.CONTRIBUTING,
        RankState.CONTRIBUTED,
        RankState.AT_BARRIER,
        RankState.THROUGH,
    }
)
"""The states of those who have closed a window, and wait."""


CHANGES_ONLY_THE_STATE = WITH_WINDOW - {RankState.THROUGH}
"""Entering these changes neither who is active, nor who waits: the most frequent ones do not."""


class Ranks(dict[int, RankState]):
    """The states of all ranks, by rank; only ``move`` changes them.

    Attributes:
        of: called with a state, returns the ranks in it, in the order of their arrival there; kept
            up to date.
        admitted: the ranks that have been let in.
        active: those of them that have not ended the epoch.
        windows: by rank, the window that it has closed, as long as it waits.
    """

    def __init__(self, everyone: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(everyone, RankState.AWAY))
        self.admitted: set[int] = set()
        self.active: set[int] = set()
        self.windows: dict[int, Window] = {}
        self._in: dict[RankState, dict[int, None]] = {state: {} for state in RankState}
        self._in[RankState.AWAY] = dict.fromkeys(self)
        # Asked several times in each event: with a function of our own, rounds would take longer.
        self.of: Callable[[RankState], KeysView[int]] = {
            state: ranks.keys() for state, ranks in self._in.items()
        }.__getitem__

    def windows_of(self, state: RankState) -> list[Window]:
        """The windows of the ranks in a state."""
        return [self.windows[rank] for rank in self._in[state]]

    def move(self, rank: int, after: RankState) -> None:
        """Change a rank's state.

        Raises:
            TrainingError: it cannot come to that from where it is.
        """
        before, places = self[rank], self._in
        if before not in BEFORE[after]:
            raise TrainingError(f"rank {rank} cannot be {after.value} now: it is {before.value}")
        self[rank] = after
        del places[before][rank]
        places[after][rank] = None
        if after in CHANGES_ONLY_THE_STATE:
            return
        (self.admitted.discard if after in NOT_ADMITTED else self.admitted.add)(rank)
        (self.active.discard if after in NOT_ACTIVE else self.active.add)(rank)
        if after not in WITH_WINDOW:
            self.windows.pop(rank, None)


class Shards:
    """Every rank's rows, as far as they are known.

    Attributes:
        row_servers: where others fetch each rank's rows, as it reported; None if they do not.
        loss_use: what the driver has made of the rows for the loss, for workers to interpret.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.row_servers: list[object] = [None] * world_size
        self.loss_use = ""
        self._found: dict[int, ShardStatistics] = {}

    def __contains__(self, rank: int) -> bool:
        """Whether a rank has reported its rows."""
        return rank in self._found

    @property
    def known(self) -> bool:
        """Whether every rank has reported its rows."""
        return len(self._found) == self._world_size

    @cached_property
    def statistics(self) -> DataStatistics:
        """What all found together; available once every rank has reported something."""
        return DataStatistics.of([self._found[rank] for rank in range(self._world_size)])

    def note(self, rank: int, shard: ShardStatistics) -> DataStatistics | None:
        """Take note of what a rank found.

        Args:
            rank: the rank whose rows they are.
            shard: what it found in its rows.

        Returns:
            The statistics of all ranks' rows with the last rank's; else None.

        Raises:
            DataError: the rank has come back, and its rows differ.
            TrainingError: the rank has other columns than the rest.
        """
        others = next(iter(self._found.values()), shard)
        if len(others.columns) != len(shard.columns):
            raise TrainingError(f"rank {rank} has {len(shard.columns)} columns, unlike the others")
        before = self._found.get(rank)
        if before is not None:  # it has come back
            _require_same(rank, before, shard)
            return None
        self._found[rank] = shard
        return self.statistics if self.known else None


def _require_same(rank: int, before: ShardStatistics, now: ShardStatistics) -> None:
    # As text, because NaN differs from itself.
    if repr(before) != repr(now):
        raise DataError(
            f"rank {rank} was restarted and read different rows ({now.rows} rows now, "
            f"{before.rows} then): the DataFrame is not the same each time it is computed (rand() "
            "without a seed, a limit, a changing source?). Persist or write it first"
        )


class Gathers:
    """The values given in the gather under way; one gather after another."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._given: dict[int, tuple[Member, object]] = {}

    def give(self, member: Member, value: object) -> None:
        """Take what a worker gives; after the last one, tell all.

        Raises:
            TrainingError: it gave twice before all others had given once.
        """
        if member.rank in self._given:
            raise TrainingError(
                f"{member} contributed twice to a gather before all others had contributed once"
            )
        self._given[member.rank] = member, value
        run, world_size = self._run, self._run.spec.world_size
        if len(self._given) < world_size:
            return
        given, self._given = self._given, {}
        members = tuple(each for each, _ in given.values())
        gathered = tuple(given[rank][1] for rank in range(world_size))
        run.do.send_gathered(members, gathered, commit=run.committed.commit_wanted)
        run.members.restart_clock()

    def withdraw(self, rank: int) -> None:
        """Forget what a lost rank gave without getting the others' values: it will give again."""
        self._given.pop(rank, None)

    @property
    def waiting(self) -> dict[int, Member]:
        """The workers that have given and wait for the others, by rank."""
        return {rank: member for rank, (member, _) in self._given.items()}

    @property
    def present(self) -> frozenset[int] | None:
        """The ranks that have given to the unfinished gather; None if nobody waits."""
        return frozenset(self._given) if self._given else None
