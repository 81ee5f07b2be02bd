"""The decisions of a round: who contributes, when the sum becomes the center, and who is sent it.

Rounds go on without lost workers; a round that holds part of a lost worker's contribution starts
over from what the others still have. Positions count only what was committed, and an epoch ends
when every rank is through with it, so no row is counted twice.

A round after which a checkpoint is due waits for the one being written. A checkpoint holds the
states of the workers whose state is that of its commit: those that contributed to it, and those
waiting for the epoch's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.decisions import Decision
from sparkdl.averager.coordination.full_round import FullRound
from sparkdl.averager.coordination.rank_states import Move, RankState
from sparkdl.averager.coordination.round import Loss
from sparkdl.averager.coordination.run_state import RunState
from sparkdl.averager.messages.run_events import RoundCommitted
from sparkdl.averager.values.center_update import Contributions
from sparkdl.events import WindowReport


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
        self._full_round = FullRound(run.spec.world_size, run.committed.progress().reports)
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
        present = len(self._run.ranks.admitted) + len(self._run.to_let_in)
        return self._commit(now) if present >= self._members.tolerance.min_workers else []

    def _commit(self, now: float) -> list[Decision]:
        """Make the round's sum the new center, and count its windows."""
        windows = self._round.commit()
        reports = [self._with_staleness(window) for window in windows]
        weighted = [report for report in reports if report.weight]
        weights = tuple(report.weight for report in weighted)
        staleness = max((report.staleness for report in weighted), default=0)
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
        waiting, final = self._round.committed_windows, list[on.WindowClosed]()
        if not self._round.pending:
            decided += self._end_epoch(now)
            final = self._round.end_epoch()
        begun = self._save_if_due(waiting, now)
        decided += begun
        decided += self.admit(now, saves=bool(begun), final=final)
        self._members.restart_clock(now)
        return decided

    def _end_epoch(self, now: float) -> list[Decision]:
        summary = self._committed.end_epoch(now)
        self._full_round.end_epoch()
        self._checkpoints.end_epoch(summary.epoch)
        return [do.Report(summary), *self._run.epoch_losses.news()]

    def _save_if_due(self, windows: Iterable[on.WindowClosed], now: float) -> list[Decision]:
        """Begin a checkpoint of the latest commit, if it is time.

        Args:
            windows: the last windows of the workers whose state is that of the commit.
            now: the time, in seconds.
        """
        if not self._checkpoints.begin_if_due(windows, now):
            return []
        begin = do.BeginCheckpoint(self._committed.progress(), self._run.shards.statistics)
        return [begin] if self._checkpoints.awaited else [begin, do.WriteCheckpoint()]

    def _with_staleness(self, window: on.WindowClosed) -> WindowReport:
        """A window's report, with how often the center was updated meanwhile."""
        staleness = self._staleness(window.member.rank) if window.report.weight else 0
        return replace(window.report, staleness=staleness) if staleness else window.report

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
