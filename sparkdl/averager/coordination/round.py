"""Who takes part in a round, and how far each of them has come.

    admitted    let in; all others have yet to join, or were lost
    pending     not yet through with the epoch
    active      both
    held        about to contribute, and waiting until the sum may be added to
    group       the active ranks whose contributions make the round: it is committed when each of
                them has contributed
    entered     contributing, or done with it
    complete    done with it
    late        left out of a round since they were sent a center, which others have changed since
    at_barrier  done with a window, and waiting for the center until the policy lets them go on
    newcomers   let in, and not yet let contribute by the policy
    kept_out    held, perhaps because the policy does not let them contribute yet
    through     waiting for the epoch's final center, after a last window
    readers     being sent a center, which the next sum must not overwrite
    queue       held ranks that wait only for the sum, and some that have been lost since

A rank whose window was its last of the epoch is no longer active; its reply comes when no rank has
rows left, that is with the epoch's final center. Then all are active again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum, auto

from sparkdl.averager.coordination.events import Member, WindowClosed
from sparkdl.averager.policies.round_policy import All, RoundPolicy


class Loss(Enum):
    """What losing a rank means for the sum."""

    NOTHING = auto()
    """It is complete without the rank, or the rank's part is complete."""
    SKIPPED = auto()
    """The rank has not added anything yet: the sum goes on without it."""
    BROKEN = auto()
    """The sum has part of a contribution that will never be complete."""


class Round:
    """One round after another; ``commit`` begins the next.

    Args:
        everyone: all ranks of the run.
        policy: who is waited for; by default everyone.
    """

    def __init__(self, everyone: Iterable[int], policy: RoundPolicy | None = None) -> None:
        self._everyone = frozenset(everyone)
        self.policy = policy or All()
        self.admitted: set[int] = set()
        self.pending: set[int] = set(self._everyone)
        self.active: set[int] = set()
        self.held: dict[int, WindowClosed] = {}
        self.group: set[int] = set()
        self.entered: dict[int, WindowClosed] = {}
        self.complete: set[int] = set()
        self.late: set[int] = set()
        self.at_barrier: dict[int, WindowClosed] = {}
        self.newcomers: set[int] = set()
        self.through: dict[int, WindowClosed] = {}
        self.readers: set[int] = set()
        self.is_open = False
        # Members of the group that are not complete, and that have not entered; kept, as they are
        # needed after every contribution.
        self._missing: set[int] = set()
        self._awaited: set[int] = set()
        # Ranks that entered late, and ranks left out of this round.
        self._entered_late: set[int] = set()
        self._left_out: set[int] = set()
        self.queue: deque[WindowClosed] = deque()
        # Ranks waiting for the policy, about which it must be asked.
        self._to_ask: list[int] = []
        self._ask_about_all = False

    def admit(self, ranks: Iterable[int]) -> None:
        """Let ranks in, between two sums; those through with the epoch report that again."""
        assert not self.is_open
        for rank in ranks:
            self.admitted.add(rank)
            self.pending.add(rank)
            self.active.add(rank)
            self.newcomers.add(rank)
            self.readers.add(rank)
            self._ask_about_all = True

    def lose(self, rank: int) -> Loss:
        """Remove a rank."""
        takes_part = rank in self._missing
        for ranks in (self.readers, self.newcomers, self.admitted, self.active, self.group):
            ranks.discard(rank)
        for ranks in (self._missing, self._awaited, self._entered_late, self._left_out, self.late):
            ranks.discard(rank)
        self.held.pop(rank, None)
        self.at_barrier.pop(rank, None)
        self.through.pop(rank, None)
        self._ask_about_all = True
        if not takes_part:
            return Loss.NOTHING
        return Loss.BROKEN if rank in self.entered else Loss.SKIPPED

    def hold(self, window: WindowClosed) -> None:
        """Make a rank wait until it may contribute."""
        self.held[window.member.rank] = window
        self.queue.append(window)

    def next(self) -> WindowClosed | None:
        """The next held rank that may contribute, each once; None if none may now."""
        while self.queue and not self.readers:
            window = self.queue[0]
            rank = window.member.rank
            is_held = self.held.get(rank) is window
            if is_held and self.is_open and rank not in self.group:
                break
            self.queue.popleft()
            if is_held and self._may_enter(rank):
                return window
        return None

    def _may_enter(self, rank: int) -> bool:
        if rank in self.newcomers and not self.policy.goes_on(rank, self.active):
            return False
        self.newcomers.discard(rank)
        return self.policy.may_contribute(rank, self.active)

    def requeue(self) -> None:
        """Let ``next`` return all held ranks again: what they waited for may have happened."""
        self.queue = deque(self.held.values())

    def enter(self, window: WindowClosed) -> bool:
        """Let a rank contribute; returns whether it is the first, so that a sum must begin."""
        rank = window.member.rank
        self.held.pop(rank, None)
        is_first, self.is_open = not self.is_open, True
        if is_first:
            self.group = set(self.policy.group(rank, self.active))
            self._missing, self._awaited = set(self.group), set(self.group)
            self.policy.opened(self.group, self.late)
        self.entered[rank] = window
        self._awaited.discard(rank)
        if rank in self.late:
            self.late.discard(rank)
            self._entered_late.add(rank)
        return is_first

    def leave_out(self) -> list[int]:
        """Go on without those that have not begun, if the rest is enough; returns them."""
        group, late = len(self.group), len(self._entered_late)
        if not self.policy.is_enough(group - len(self._awaited), late, group):
            return []
        left, self._awaited = self._awaited, set()
        self.group -= left
        self._missing -= left
        self._left_out |= left
        return sorted(left)

    def finish(self, rank: int) -> None:
        """Note that a rank's contribution is complete."""
        self.complete.add(rank)
        self._missing.discard(rank)

    @property
    def kept_out(self) -> dict[int, WindowClosed]:
        """The held ranks that the policy may keep from contributing."""
        if self.policy.holds_windows:
            return self.held
        return {rank: self.held[rank] for rank in self.newcomers & self.held.keys()}

    @property
    def behind_others(self) -> dict[int, WindowClosed]:
        """The ranks that have begun to contribute and wait for others to do so."""
        first = min(self._missing, default=None)
        return {rank: window for rank, window in self.entered.items() if rank != first}

    @property
    def waiting(self) -> dict[int, Member]:
        """The ranks that have closed a window and wait for others, which may train for long."""
        windows = self.behind_others | self.at_barrier | self.through
        if not self.policy.in_step:
            windows |= self.kept_out
        return {rank: each.member for rank, each in windows.items() if not each.member.gone}

    @property
    def awaits_anyone(self) -> bool:
        """Whether any member of the group has not begun to contribute."""
        return bool(self._awaited)

    @property
    def is_complete(self) -> bool:
        """Whether every member of the group has contributed."""
        return self.is_open and not self._missing

    def start_over(self) -> tuple[Member, ...]:
        """Forget the sum; returns the members that must contribute again."""
        again = tuple(window.member for window in self.entered.values())
        self.late |= self._entered_late
        self._begin_next()
        return tuple(member for member in again if not member.gone)

    def commit(self) -> list[WindowClosed]:
        """End the round; returns the windows of its contributions, by rank.

        Those that were the last of their ranks' epochs are ``through`` from here on, the others'
        ranks are ``at_barrier``.
        """
        windows = [self.entered[rank] for rank in sorted(self.complete)]
        for window in windows:
            rank = window.member.rank
            if window.report.last:
                self.pending.discard(rank)
                self.active.discard(rank)
                if not window.member.gone:
                    self.through[rank] = window
            elif not window.member.gone:
                self.at_barrier[rank] = window
                self._to_ask.append(rank)
        self.late |= self._left_out
        self._begin_next()
        self._to_ask += self.policy.committed((w.report for w in windows), self.active)
        return windows

    def release(self) -> list[WindowClosed]:
        """Let those go on that the policy lets, between two sums; they become readers.

        Returns:
            The last contribution of each of them.
        """
        assert not self.is_open
        may_wait = self.held if self.policy.holds_windows else self.newcomers
        ranks = [*self.at_barrier, *may_wait] if self._ask_about_all else self._to_ask
        self._to_ask, self._ask_about_all = [], False
        # The queue asks about those once they have trained.
        asked = [rank for rank in ranks if rank in may_wait and rank in self.held]
        self.queue.extend(self.held[rank] for rank in asked)
        released = [
            self.at_barrier.pop(rank)
            for rank in ranks
            if rank in self.at_barrier and self.policy.goes_on(rank, self.active)
        ]
        self.readers |= {window.member.rank for window in released}
        return released

    def end_epoch(self) -> list[WindowClosed]:
        """Make everyone active again; returns the windows of those waiting for the center."""
        waiting, self.through = list(self.through.values()), {}
        self.readers |= {window.member.rank for window in waiting}
        self.pending = set(self._everyone)
        self.active = set(self.admitted)
        return waiting

    def _begin_next(self) -> None:
        self.entered, self.complete, self.is_open = {}, set(), False
        self.group, self._missing, self._awaited = set(), set(), set()
        self._entered_late, self._left_out = set(), set()
