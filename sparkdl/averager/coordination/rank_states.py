"""Where each worker of a run stands: one state per rank, and one table of how states change.

A change that the table does not have ends the run: only bugs in a strategy, or a worker that runs
other code, get that far. docs/architecture.md shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Mapping
from enum import Enum

from sparkdl.averager.coordination.events import WindowClosed
from sparkdl.errors import TrainingError


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


class Move(Enum):
    """What changes a rank's state."""

    __hash__ = object.__hash__

    JOIN = "joins"
    READ = "reports its rows"
    LET_IN = "is let in"
    TAKE = "takes the center"
    CLOSE = "closes a window"
    ENTER = "contributes"
    COMPLETE = "has contributed"
    START_OVER = "starts over"
    COMMIT = "commits"
    END_EPOCH = "commits its last window of the epoch"
    GO_ON = "goes on"
    FINISH = "finishes"
    LOSE = "is lost"


TRANSITIONS: Mapping[Move, Mapping[RankState, RankState]] = {
    Move.JOIN: {RankState.AWAY: RankState.READING},
    Move.READ: {
        RankState.READING: RankState.READY,
        RankState.READY: RankState.READY,  # now of all its rows
    },
    Move.LET_IN: {RankState.READY: RankState.RECEIVING},
    Move.TAKE: {RankState.RECEIVING: RankState.TRAINING},
    Move.CLOSE: {
        RankState.TRAINING: RankState.CLOSED,
        RankState.RECEIVING: RankState.CLOSED,  # before the averager knows that it has it all
    },
    Move.ENTER: {RankState.CLOSED: RankState.CONTRIBUTING},
    Move.COMPLETE: {RankState.CONTRIBUTING: RankState.CONTRIBUTED},
    Move.START_OVER: {
        RankState.CONTRIBUTING: RankState.TRAINING,
        RankState.CONTRIBUTED: RankState.TRAINING,
    },
    Move.COMMIT: {RankState.CONTRIBUTED: RankState.AT_BARRIER},
    Move.END_EPOCH: {RankState.CONTRIBUTED: RankState.THROUGH},
    Move.GO_ON: {
        RankState.AT_BARRIER: RankState.RECEIVING,
        RankState.THROUGH: RankState.RECEIVING,
    },
    Move.FINISH: {
        RankState.RECEIVING: RankState.FINISHED,
        RankState.TRAINING: RankState.FINISHED,
        RankState.AWAY: RankState.FINISHED,  # it was dropped with its last word on its way
    },
    Move.LOSE: dict.fromkeys(set(RankState) - {RankState.AWAY, RankState.FINISHED}, RankState.AWAY),
}
"""By what happens: the state before, and the state after."""
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


CHANGES_ONLY_THE_STATE = frozenset({Move.TAKE, Move.CLOSE, Move.ENTER, Move.COMPLETE, Move.COMMIT})
"""What changes neither who is active, nor who waits: the most frequent ones do not."""


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
        self.windows: dict[int, WindowClosed] = {}
        self._in: dict[RankState, dict[int, None]] = {state: {} for state in RankState}
        self._in[RankState.AWAY] = dict.fromkeys(self)
        # Asked several times in each event: with a function of our own, rounds would take longer.
        self.of: Callable[[RankState], KeysView[int]] = {
            state: ranks.keys() for state, ranks in self._in.items()
        }.__getitem__

    def windows_of(self, state: RankState) -> list[WindowClosed]:
        """The windows of the ranks in a state."""
        return [self.windows[rank] for rank in self._in[state]]

    def move(self, rank: int, how: Move) -> None:
        """Change a rank's state.

        Raises:
            TrainingError: that cannot happen in its state.
        """
        before, places = self[rank], self._in
        after = TRANSITIONS[how].get(before)
        if after is None:
            raise TrainingError(f"rank {rank} {how.value} out of order: it is {before.value}")
        self[rank] = after
        del places[before][rank]
        places[after][rank] = None
        if how in CHANGES_ONLY_THE_STATE:
            return
        (self.admitted.discard if after in NOT_ADMITTED else self.admitted.add)(rank)
        (self.active.discard if after in NOT_ACTIVE else self.active.add)(rank)
        if after not in WITH_WINDOW:
            self.windows.pop(rank, None)
