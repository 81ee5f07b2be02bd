"""Who takes part in a round, and what part of a full round it is.

``rank_states`` knows how far each of them has come::

    group       the active ranks whose contributions form the round: it is committed
                once each of them has contributed
    entered     the windows in the sum, by rank, also of some that were lost since
    pending     not yet done with the epoch
    late        left out of a round since they were sent a center, which others have changed
    newcomers   let in, but not yet allowed to contribute by the policy
    queue       closed windows that only the sum keeps waiting, and some that were lost since

A rank whose window was its last of the epoch is no longer active; its reply comes once no rank has
rows left, that is, with the epoch's final center. Then all are active again.

A round moves the center by the part of a full round's weight that it has, so that a row weighs the
same whoever else is in its round. Otherwise a round of one would move the center as far as a round
of all, and a slow worker, whose last windows of an epoch are rounds of its own, would count several
times.

A full round is the one that a window would be in if all were equally fast: with the window of each
rank that begins after as many rows of the epoch. Ranks whose rows have come to an end by then have
none, so that the last windows of the rank with the most rows are full rounds, as they are where
everyone is waited for. How many rows a rank has is known once it has ended an epoch, and may change
a little when rows are exchanged; until then it is taken to have enough. Rows of ranks that are not
in a round are taken to weigh as much as the mean row so far.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.coordination.rank_states import Ranks, RankState, Window
from sparkdl.averager.round_policy import All, RoundPolicy
from sparkdl.events import WindowReport, WindowSums


class Round:
    """One round after another; ``commit`` begins the next.

    Args:
        everyone: all ranks of the run.
        policy: who is waited for; by default everyone.
    """

    def __init__(self, everyone: Iterable[int], policy: RoundPolicy | None = None) -> None:
        self._everyone = frozenset(everyone)
        self.policy = policy or All()
        self.ranks = Ranks(self._everyone)
        self.pending: set[int] = set(self._everyone)
        self.group: set[int] = set()
        self.entered: dict[int, Window] = {}
        self.late: set[int] = set()
        self.newcomers: set[int] = set()
        self.is_open = False
        self._left_out: list[int] = []
        self.queue: deque[Window] = deque()
        # The waiting ranks that the policy has to be asked about.
        self._to_ask: list[int] = []
        self._ask_about_all = False

    def admit(self, ranks: Iterable[int]) -> None:
        """Let ranks in, between two sums; those through with the epoch will say so again."""
        assert not self.is_open
        for rank in ranks:
            self.ranks.move(rank, RankState.RECEIVING)
            self.pending.add(rank)
            self.newcomers.add(rank)
            self._ask_about_all = True

    def lose(self, rank: int) -> RankState | None:
        """Remove a rank.

        Returns:
            Where it stood, if its contribution is missing; the sum may hold part of that if it was
            contributing.
        """
        state = self.ranks[rank]
        is_missing = rank in self.group and state is not RankState.CONTRIBUTED
        self.ranks.move(rank, RankState.AWAY)
        for ranks in (self.group, self.newcomers, self.late):
            ranks.discard(rank)
        self._ask_about_all = True
        return state if is_missing else None

    def hold(self, window: Window) -> None:
        """Have a rank wait until it may contribute."""
        self.ranks.move(window.member.rank, RankState.CLOSED)
        self.ranks.windows[window.member.rank] = window
        self.queue.append(window)

    def next(self) -> Window | None:
        """The next closed window that may contribute, each once; None if none may now."""
        while self.queue and not self.ranks.of(RankState.RECEIVING):
            window = self.queue[0]
            rank = window.member.rank
            waits = self.ranks[rank] is RankState.CLOSED and self.ranks.windows[rank] is window
            if waits and self.is_open and rank not in self.group:
                break
            self.queue.popleft()
            if waits and self._may_enter(rank):
                return window
        return None

    def _may_enter(self, rank: int) -> bool:
        if rank in self.newcomers and not self.policy.goes_on(rank, self.ranks.active):
            return False
        self.newcomers.discard(rank)
        return self.policy.may_contribute(rank, self.ranks.active)

    def requeue(self) -> None:
        """Have ``next`` go through all closed windows again: their wait may be over."""
        self.queue = deque(self.ranks.windows_of(RankState.CLOSED))

    def enter(self, window: Window) -> bool:
        """Let a rank contribute; returns whether it is the first, for which a sum has to begin."""
        rank = window.member.rank
        is_first, self.is_open = not self.is_open, True
        if is_first:
            self.group = set(self.policy.group(rank, self.ranks.active))
            self.policy.opened(self.group, self.late)
        self.ranks.move(rank, RankState.CONTRIBUTING)
        self.entered[rank] = window
        return is_first

    def leave_out(self) -> list[int]:
        """Go on without those that have not begun, if enough have; returns those left out."""
        late = len(self.late & self.entered.keys())
        if not self.policy.is_enough(self._begun, late, len(self.group)):
            return []
        left = sorted(self.group - self.entered.keys())
        self.group.difference_update(left)
        self._left_out += left
        return left

    def finish(self, rank: int) -> None:
        """Take note that a rank's contribution is complete."""
        self.ranks.move(rank, RankState.CONTRIBUTED)

    @property
    def _begun(self) -> int:
        """How many of the group have begun to contribute."""
        of = self.ranks.of
        return len(of(RankState.CONTRIBUTING)) + len(of(RankState.CONTRIBUTED))

    @property
    def waiting(self) -> dict[int, Member]:
        """Workers that have closed a window and wait for others, perhaps for long; by rank."""
        first = min(self.group - self.ranks.of(RankState.CONTRIBUTED), default=None)
        windows = [window for rank, window in self.entered.items() if rank != first]
        windows += self.committed_windows
        if not self.policy.in_step:  # those that the policy may keep from contributing
            closed = self.ranks.of(RankState.CLOSED)
            kept = closed if self.policy.holds_windows else closed & self.newcomers
            windows += [self.ranks.windows[rank] for rank in kept]
        return {each.member.rank: each.member for each in windows if not each.member.gone}

    @property
    def committed_windows(self) -> list[Window]:
        """The windows of those that wait for the center after a commit."""
        of = self.ranks.windows_of
        return of(RankState.AT_BARRIER) + of(RankState.THROUGH)

    @property
    def awaits_anyone(self) -> bool:
        """Whether anyone in the group has not begun to contribute."""
        return self._begun < len(self.group)

    @property
    def is_complete(self) -> bool:
        """Whether everyone in the group has contributed."""
        return self.is_open and len(self.ranks.of(RankState.CONTRIBUTED)) == len(self.group)

    def start_over(self) -> tuple[Member, ...]:
        """Forget the sum; returns the workers that have to contribute again."""
        windows = self.entered.values()
        again = tuple(window.member for window in windows if not window.member.gone)
        for member in again:
            self.ranks.move(member.rank, RankState.TRAINING)
        self._begin_next()
        return again

    def commit(self) -> list[Window]:
        """End the round; returns the windows that contributed, in rank order."""
        windows = [self.entered[rank] for rank in sorted(self.entered)]
        for window in windows:
            rank, last = window.member.rank, window.report.last
            if last:
                self.pending.discard(rank)
            if not window.member.gone:
                self.ranks.move(rank, RankState.THROUGH if last else RankState.AT_BARRIER)
                if not last:
                    self._to_ask.append(rank)
        self.late -= self.entered.keys()
        self.late |= self.ranks.active & set(self._left_out)
        self._begin_next()
        reports = (window.report for window in windows)
        self._to_ask += self.policy.committed(reports, self.ranks.active)
        return windows

    def release(self) -> list[Window]:
        """Let those ranks go on that the policy lets, between two sums.

        Returns:
            The window that each of them contributed last.
        """
        assert not self.is_open
        states, windows, active = self.ranks, self.ranks.windows, self.ranks.active
        closed, at_barrier = states.of(RankState.CLOSED), states.of(RankState.AT_BARRIER)
        may_wait = closed if self.policy.holds_windows else self.newcomers
        ranks = [*at_barrier, *may_wait] if self._ask_about_all else self._to_ask
        self._to_ask, self._ask_about_all = [], False
        released = []
        for rank in ranks:
            if rank in at_barrier and self.policy.goes_on(rank, active):
                released.append(windows[rank])
                states.move(rank, RankState.RECEIVING)
            elif rank in closed and rank in may_wait:
                # ``next`` asks the policy about it, once it has trained.
                self.queue.append(windows[rank])
        return released

    def end_epoch(self) -> list[Window]:
        """Make everyone active again; returns the windows of those that wait for the center."""
        waiting = self.ranks.windows_of(RankState.THROUGH)
        for window in waiting:
            self.ranks.move(window.member.rank, RankState.RECEIVING)
        self.pending = set(self._everyone)
        return waiting

    def _begin_next(self) -> None:
        self.entered, self.group = {}, set()
        self._left_out = []
        self.is_open = False


ROUNDING = 1e-9
"""By how much the sum of a full round's parts may differ from 1."""


class FullRound:
    """What everyone's rounds would be, of one run.

    Args:
        world_size: number of ranks.
        sums: what the windows committed in the epoch under way add up to.
    """

    def __init__(self, world_size: int, sums: Iterable[WindowSums] = ()) -> None:
        # By rank: rows committed in the epoch under way, and in a whole epoch if that is known.
        self._done = [0] * world_size
        self._rows: list[float] = [math.inf] * world_size
        # The known numbers of rows in ascending order, and sums of the first 0, 1, ... of them.
        self._sorted: list[float] = []
        self._sums: list[float] = []
        self._is_sorted = False
        # The most rows in a window, in the epoch before and in the one under way.
        self._longest_before = self._longest = 0
        self._examples, self._weight = 0, 0.0
        for each in sums:
            self._note(each, each.longest)

    def share(self, windows: Sequence[WindowReport]) -> float:
        """Take note of a round's windows; returns what part of a full round's weight they have.

        Args:
            windows: all that are committed together, each of another rank.

        Returns:
            In (0, 1], and exactly 1 if all that a full round has are in it.
        """
        begun = [self._done[window.rank] for window in windows]
        for window in windows:
            self._note(window, window.examples)
        present = sum(window.examples for window in windows)
        weight = sum(window.weight for window in windows)
        if not present or not weight:
            return 1.0
        full = [
            self._rows_from(start, self._length(window))
            for start, window in zip(begun, windows, strict=True)
        ]
        pairs = zip(windows, full, strict=True)
        parts = sum(window.examples / rows for window, rows in pairs if window.examples)
        if parts > 1 - ROUNDING:
            return 1.0
        missing = (present / parts - present) * self._weight / self._examples
        return weight / (weight + missing)

    def end_epoch(self) -> None:
        """Begin another epoch."""
        self._done = [0] * len(self._done)
        self._longest_before, self._longest = self._longest, 0

    def _note(self, window: WindowReport | WindowSums, longest: int) -> None:
        rank = window.rank
        self._done[rank] += window.examples
        self._longest = max(self._longest, longest)
        self._examples += window.examples
        self._weight += window.weight
        done = self._done[rank]
        if done > self._rows[rank] or (window.last and done != self._rows[rank]):
            self._rows[rank] = done if window.last else math.inf
            self._is_sorted = False

    def _length(self, window: WindowReport) -> int:
        """Rows of a window that is as long as windows are; an epoch's last may be shorter."""
        if not window.last:
            return window.examples
        return max(self._longest, self._longest_before)

    def _rows_from(self, start: int, length: int) -> float:
        """Rows of all ranks among their rows ``start`` to ``start + length`` of the epoch."""
        return self._rows_before(start + length) - self._rows_before(start)

    def _rows_before(self, stop: int) -> float:
        """Rows of all ranks among their first ``stop`` ones of the epoch."""
        if not self._is_sorted:
            self._sorted = sorted(rows for rows in self._rows if rows < math.inf)
            self._sums = [0.0, *accumulate(self._sorted)]
            self._is_sorted = True
        shorter = bisect_right(self._sorted, stop)
        return self._sums[shorter] + stop * (len(self._rows) - shorter)
