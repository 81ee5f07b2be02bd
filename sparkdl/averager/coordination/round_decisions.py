"""The decisions of a round: who contributes, when the sum becomes the center, and who is sent it.

Rounds go on without lost workers; a round that holds part of a lost worker's contribution starts
over from what the others still have. Positions count only what was committed, and an epoch ends
when every rank is through with it, so no row is counted twice.

A round after which a checkpoint is due waits for the one being written. A checkpoint holds the
states of the workers whose state is that of its commit: those that contributed to it, and those
waiting for the epoch's end.

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
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.decisions import Decision
from sparkdl.averager.coordination.rank_states import Move, RankState
from sparkdl.averager.coordination.round import Loss
from sparkdl.averager.coordination.run_state import RunState
from sparkdl.averager.messages.run_events import RoundCommitted
from sparkdl.averager.values.center_update import Contributions
from sparkdl.events import WindowReport, WindowSums


class RoundDecisions:
    """The decisions of one round after another; ``Round`` knows who takes part."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._round = run.round
        self._members = run.members
        self._committed = run.committed
        self._checkpoints = run.checkpoints
        # How often the center has been updated, in all and before each rank was sent it.
        self._updates = 0
        self._full_round = FullRound(run.spec.world_size, run.committed.progress().sums)
        self._sent: dict[int, int] = {}

    # Contributing.

    def close_window(self, window: on.WindowClosed, now: float) -> None:
        """Have a worker contribute what it trained, as soon as it may."""
        self._members.end_window(window.member.rank, now)
        self._round.policy.closed(window.report, now)
        self._round.hold(window)

    def enter_held(self, now: float) -> list[Decision]:
        """Let those that wait contribute, as long as the sum may be added to."""
        decided: list[Decision] = []
        while (window := self._round.next()) is not None:
            if not self._checkpoints.holds(window):
                decided += self._enter(window, now)
        return decided

    def _enter(self, window: on.WindowClosed, now: float) -> list[Decision]:
        member, weight = window.member, window.report.weight
        decided: list[Decision] = []
        if self._round.enter(window):
            decided.append(do.OpenSum(tuple(sorted(self._round.group))))
        staleness = self._staleness(member.rank)
        decided.append(do.Receive(member, weight, staleness) if weight else do.Skip(member.rank))
        if not self._round.policy.in_step:
            decided += map(do.Skip, self._round.leave_out())
        if not weight:
            decided += self.complete(member.rank, now)
        return decided

    def complete(self, rank: int, now: float) -> list[Decision]:
        """Take note that a contribution is complete."""
        if rank not in self._round.entered:
            return []  # its last bytes arrived along with the loss that made everyone start over
        self._round.finish(rank)
        # Those waiting for their turn to add could not send anything.
        self._members.pass_turn(now)
        return self.commit_if_complete(now)

    def take(self, rank: int, now: float) -> None:
        """Take note that a worker has received what it was sent, and is training."""
        ranks = self._run.ranks
        if ranks[rank] is RankState.RECEIVING:
            ranks.move(rank, Move.TAKE)
            self._members.begin_window(rank, now)
        if not ranks.of(RankState.RECEIVING):
            self._members.pass_turn(now)

    def lose(self, rank: int, now: float) -> list[Decision]:
        """Go on without a worker, or start over if the sum holds part of its contribution."""
        decided: list[Decision] = []
        loss = self._round.lose(rank)
        if loss is Loss.BROKEN:
            decided.append(do.StartOver(self._round.start_over()))
        elif loss is Loss.SKIPPED:
            decided += map(do.Skip, [rank, *self._round.leave_out()])
        if not self._round.is_open:
            decided += self.admit(now)
        return decided

    # Committing.

    def commit_if_complete(self, now: float) -> list[Decision]:
        """Commit if everyone has contributed and enough workers are present."""
        if not self._round.is_complete:
            return []
        ranks = self._run.ranks
        present = len(ranks.admitted) + len(ranks.of(RankState.READY))
        return self._commit(now) if present >= self._members.tolerance.min_workers else []

    def _commit(self, now: float) -> list[Decision]:
        """Make the round's sum the new center, and count its windows."""
        windows = self._round.commit()
        reports = [self._with_staleness(window) for window in windows]
        weights = tuple(weight for report in reports if (weight := report.weight))
        # Reports without weight have none.
        staleness = max((report.staleness for report in reports), default=0)
        in_step = self._round.policy.in_step
        share = 1.0 if in_step else self._full_round.share(reports)
        world_size = self._members.world_size
        decided: list[Decision] = [
            do.Commit(Contributions(weights, world_size, staleness, share=share))
        ]
        self._updates += bool(weights)
        self._committed.commit(
            reports,
            {window.member.rank: window.kept for window in windows if window.kept is not None},
        )
        decided += map(do.Report, reports)
        if self._run.spec.followed:
            decided.append(do.Report(RoundCommitted(self._committed.round, tuple(reports))))
        ends = not self._round.pending
        if ends:
            decided += self._end_epoch(now)
        begun = self._save_if_due(now)
        decided += begun
        final = self._round.end_epoch() if ends else ()
        decided += self.admit(now, saves=bool(begun), final=final)
        self._members.restart_clock(now)
        return decided

    def _end_epoch(self, now: float) -> list[Decision]:
        summary = self._committed.end_epoch(now)
        self._full_round.end_epoch()
        self._checkpoints.end_epoch(summary.epoch)
        return [do.Report(summary), *self._run.epoch_losses.news()]

    def _save_if_due(self, now: float) -> list[Decision]:
        """Begin a checkpoint of the latest commit, if it is time."""
        if not self._checkpoints.due:
            return []
        # Workers that come back later have another state.
        self._checkpoints.begin((each.member.rank for each in self._round.committed_windows), now)
        begin = do.BeginCheckpoint(self._committed.progress(), self._run.shards.statistics)
        return [begin] if self._checkpoints.awaited else [begin, do.WriteCheckpoint()]

    def _with_staleness(self, window: on.WindowClosed) -> WindowReport:
        """A window's report, with how often the center was updated meanwhile."""
        staleness, report = self._staleness(window.member.rank), window.report
        return replace(report, staleness=staleness) if staleness and report.weight else report

    def _staleness(self, rank: int) -> int:
        return self._updates - self._sent[rank]

    # Between two rounds.

    def admit_when_possible(self, now: float, *, serves_rows: bool) -> list[Decision]:
        """Let in a worker that has become ready, now or after the round under way.

        Args:
            now: the time, in seconds.
            serves_rows: whether others fetch rows from it.
        """
        decided: list[Decision] = []
        if self._round.is_open and serves_rows and self._round.awaits_anyone:
            # One of those awaited may have to fetch rows from this rank before it can contribute.
            decided.append(do.StartOver(self._round.start_over()))
        if not self._round.is_open:
            decided += self.admit(now)
        return decided + self.commit_if_complete(now)

    def admit(
        self, now: float, *, saves: bool = False, final: Sequence[on.WindowClosed] = ()
    ) -> list[Decision]:
        """Let in whoever is ready, and let those go on that need not wait for others any more.

        Args:
            now: the time, in seconds.
            saves: whether the last commit becomes a checkpoint.
            final: the last windows of those that waited for the epoch's end.
        """
        let_in = self._run.to_let_in
        self._round.admit(let_in)
        decided: list[Decision] = []
        for is_final, windows in ((False, self._round.release()), (True, final)):
            for window in windows:
                self._begin(window.member.rank, now)
                decided.append(do.Reply(window.member, is_final, window.takes_reply, saves))
        if saves and not final:
            waiting = self._round.committed_windows
            decided += [do.AskWorkerState(window.member) for window in waiting]
        for rank in let_in:
            self._members.note_heartbeat(rank, now)
            self._begin(rank, now)
            decided.append(do.Welcome(self._members.of(rank)))
        return decided

    def _begin(self, rank: int, now: float) -> None:
        """Take note that a rank is sent the center."""
        self._sent[rank] = self._updates
        self._round.policy.began(rank, now)


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
