"""Where each worker of a run stands: one state per rank, and one table of what may follow what.

A change that the table does not have ends the run: only bugs in a strategy, or a worker that runs
other code, get that far. docs/architecture.md shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Mapping
from dataclasses import dataclass
from enum import Enum

from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.messages.progress import WorkerState
from sparkdl.errors import TrainingError
from sparkdl.events import WindowReport


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
