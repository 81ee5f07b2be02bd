"""The decisions of a round: who contributes, when the sum becomes the center, and who is sent it.

Rounds go on without lost workers; a round that holds part of a lost worker's contribution starts
over from what the others still have. Positions count only what was committed, and an epoch ends
when every rank is through with it, so no row is counted twice.

A round after which a checkpoint is due waits for the one being written. A checkpoint holds the
states of the workers whose state is that of its commit: those that contributed to it, and those
waiting for the epoch's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.arrivals import Arrivals
from sparkdl.averager.coordination.checkpointing import Checkpointing
from sparkdl.averager.coordination.committed import CommittedProgress
from sparkdl.averager.coordination.epoch_losses import EpochLosses
from sparkdl.averager.coordination.full_round import FullRound
from sparkdl.averager.coordination.membership import Membership
from sparkdl.averager.coordination.round import Loss, Round
from sparkdl.averager.coordination.shards import Shards
from sparkdl.averager.messages.run_events import RoundCommitted
from sparkdl.averager.values.center_update import Contributions
from sparkdl.events import WindowReport


class RoundDecisions:
    """The decisions of one round after another; ``Round`` knows who takes part.

    Args:
        round: who takes part in the round under way.
        members: who is in the run.
        arrivals: who waits to be let in.
        shards: what the workers found in their rows.
        committed: how far the training has come.
        checkpoints: the checkpoint being put together, and when the next is due.
        epoch_losses: who is told epochs' losses.
        followed: whether the driver is told of commits.
        decide: called with what is to be done, in order.
    """

    def __init__(
        self,
        round: Round,
        members: Membership,
        arrivals: Arrivals,
        shards: Shards,
        committed: CommittedProgress,
        checkpoints: Checkpointing,
        epoch_losses: EpochLosses,
        *,
        followed: bool,
        decide: Callable[[do.Decision], None],
    ) -> None:
        self._round = round
        self._members = members
        self._arrivals = arrivals
        self._shards = shards
        self._committed = committed
        self._checkpoints = checkpoints
        self._epoch_losses = epoch_losses
        self._followed = followed
        self._decide = decide
        # How often the center has been updated, in all and before each rank was sent it.
        self._updates = 0
        self._full_round = FullRound(members.world_size, committed.progress().reports)
        self._sent: dict[int, int] = {}

    # Contributing.

    def close_window(self, window: on.WindowClosed, now: float) -> None:
        """Have a worker contribute what it trained, as soon as it may."""
        self._members.end_window(window.member.rank, now)
        self._round.policy.closed(window.report, now)
        self._round.hold(window)

    def enter_held(self, now: float) -> None:
        """Let held workers contribute, as long as the sum may be added to."""
        while (window := self._round.next()) is not None:
            if not self._checkpoints.holds(window):
                self._enter(window, now)

    def _enter(self, window: on.WindowClosed, now: float) -> None:
        member, weight = window.member, window.report.weight
        if self._round.enter(window):
            self._decide(do.OpenSum(tuple(sorted(self._round.group))))
        staleness = self._staleness(member.rank)
        self._decide(do.Receive(member, weight, staleness) if weight else do.Skip(member.rank))
        if not self._round.policy.in_step:
            self._skip(self._round.leave_out())
        if not weight:
            self.complete(member.rank, now)

    def complete(self, rank: int, now: float) -> None:
        """Take note that a contribution is complete."""
        if rank not in self._round.entered:
            return  # its last bytes arrived along with the loss that made everyone start over
        self._round.finish(rank)
        # Those waiting for their turn to add could not send anything.
        self._members.pass_turn(now)
        self.commit_if_complete(now)

    def take(self, rank: int, now: float) -> None:
        """Take note that a worker has received what it was sent, and is training."""
        readers = self._round.readers
        readers.discard(rank)
        self._members.begin_window(rank, now)
        if not readers:
            self._members.pass_turn(now)

    def lose(self, rank: int, now: float) -> None:
        """Go on without a worker, or start over if the sum holds part of its contribution."""
        loss = self._round.lose(rank)
        if loss is Loss.BROKEN:
            self._start_over()
        elif loss is Loss.SKIPPED:
            self._skip([rank, *self._round.leave_out()])
        if not self._round.is_open:
            self.admit(now)

    def _start_over(self) -> None:
        self._decide(do.StartOver(self._round.start_over()))

    def _skip(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._decide(do.Skip(rank))

    # Committing.

    def commit_if_complete(self, now: float) -> None:
        """Commit if everyone has contributed and enough workers are present."""
        enough = len(self._round.admitted) + len(self._arrivals.knocking)
        if self._round.is_complete and enough >= self._members.tolerance.min_workers:
            self._commit(now)

    def _commit(self, now: float) -> None:
        """Make the round's sum the new center, and count its windows."""
        windows = self._round.commit()
        reports = [self._with_staleness(window) for window in windows]
        weighted = [report for report in reports if report.weight]
        weights = tuple(report.weight for report in weighted)
        staleness = max((report.staleness for report in weighted), default=0)
        in_step = self._round.policy.in_step
        share = 1.0 if in_step else self._full_round.share(reports)
        world_size = self._members.world_size
        self._decide(do.Commit(Contributions(weights, world_size, staleness, share=share)))
        self._updates += bool(weights)
        self._committed.commit(
            reports,
            {window.member.rank: window.kept for window in windows if window.kept is not None},
        )
        for report in reports:
            self._decide(do.Report(report))
        if self._followed:
            self._decide(do.Report(RoundCommitted(self._committed.round, tuple(reports))))
        waiting = [*self._round.at_barrier.values(), *self._round.through.values()]
        final = self._end_epoch(now) if not self._round.pending else []
        self.admit(now, saves=self._save_if_due(waiting, now), final=final)
        self._members.restart_clock(now)

    def _end_epoch(self, now: float) -> list[on.WindowClosed]:
        """Go on to the next epoch; returns the windows of those waiting for the final center."""
        summary = self._committed.end_epoch(now)
        self._full_round.end_epoch()
        self._decide(do.Report(summary))
        self._checkpoints.end_epoch(summary.epoch)
        for decision in self._epoch_losses.news():
            self._decide(decision)
        return self._round.end_epoch()

    def _save_if_due(self, windows: Iterable[on.WindowClosed], now: float) -> bool:
        """Begin a checkpoint of the latest commit, if it is time.

        Args:
            windows: the last windows of the workers whose state is that of the commit.
            now: the time, in seconds.
        """
        if not self._checkpoints.begin_if_due(windows, now):
            return False
        progress = self._committed.progress()
        self._decide(do.BeginCheckpoint(progress, self._shards.statistics))
        if not self._checkpoints.awaited:
            self._decide(do.WriteCheckpoint())
        return True

    def _with_staleness(self, window: on.WindowClosed) -> WindowReport:
        """A window's report, with how often the center was updated meanwhile."""
        staleness = self._staleness(window.member.rank) if window.report.weight else 0
        return replace(window.report, staleness=staleness) if staleness else window.report

    def _staleness(self, rank: int) -> int:
        return self._updates - self._sent[rank]

    # Between two rounds.

    def knock(self, now: float, *, serves_rows: bool) -> None:
        """Let in a worker that has become ready, now or after the round under way.

        Args:
            now: the time, in seconds.
            serves_rows: whether others fetch rows from it.
        """
        if self._round.is_open and serves_rows and self._round.awaits_anyone:
            # One of those awaited may have to fetch rows from this rank before it can contribute.
            self._start_over()
        if not self._round.is_open:
            self.admit(now)
        self.commit_if_complete(now)

    def admit(
        self, now: float, *, saves: bool = False, final: Sequence[on.WindowClosed] = ()
    ) -> None:
        """Let in whoever is ready, and let those go on that need not wait for others any more.

        Args:
            now: the time, in seconds.
            saves: whether the last commit becomes a checkpoint.
            final: the last windows of those that waited for the epoch's end.
        """
        knocking = sorted(self._arrivals.knocking)
        self._round.admit(knocking)
        for is_final, windows in ((False, self._round.release()), (True, final)):
            for window in windows:
                self._begin(window.member.rank, now)
                self._decide(do.Reply(window.member, is_final, window.takes_reply, saves))
        if saves and not final:
            for window in chain(self._round.at_barrier.values(), self._round.through.values()):
                self._decide(do.AskWorkerState(window.member))
        for rank in knocking:
            self._members.note_heartbeat(rank, now)
            self._begin(rank, now)
            self._decide(do.Welcome(self._arrivals.ready.pop(rank)))

    def _begin(self, rank: int, now: float) -> None:
        """Take note that a rank is sent the center."""
        self._sent[rank] = self._updates
        self._round.policy.began(rank, now)
