"""What the averager decides: events with their times in, decisions out.

There is no lock, thread, socket or clock in here, so the same decisions serve two workers over TCP
and ten thousand in a simulation. Events are methods of the coordinator, and decisions are calls of
``Actions`` that are recorded in order. A run goes like this:

    every worker     joined, rows_found                     -> the driver is told the statistics
    the driver       start                                  -> welcome
    every worker     taken, window_closed, contributed, ... -> receive; commit and reply
    every worker     finished                               -> end

Workers may be lost as often as the run tolerates, and come back: they continue after their last
committed window.

Rounds go on without lost workers; a round that holds part of a lost worker's contribution starts
over from what the others still have. Positions count only what was committed, and an epoch ends
when every rank is through with it, so no row is counted twice.

A round after which a checkpoint is due waits for the one being written. A checkpoint holds the
states of the workers whose state is that of its commit: those that contributed to it, and those
waiting for the epoch's end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparkdl.averager.coordination import checks
from sparkdl.averager.coordination.actions import event
from sparkdl.averager.coordination.membership import FencedError, Member
from sparkdl.averager.coordination.rank_states import RankState, Window
from sparkdl.averager.coordination.round import FullRound
from sparkdl.averager.coordination.run_state import Restart, RunSpec, RunState
from sparkdl.averager.run_events import (
    CheckpointSaved,
    RoundCommitted,
    WorkerLost,
    WorkerState,
)
from sparkdl.averager.values.center_update import Contributions
from sparkdl.errors import SparkDLError, TrainingError
from sparkdl.events import MetricValue, ValidationReport, WindowReport
from sparkdl.feed.shards import ShardStatistics

logger = logging.getLogger(__name__)


class Coordinator(RunState):
    """The decisions of one run.

    Args:
        spec: how it was planned.
        now: the time, in seconds, by the same clock as that of events.
        restart: where it goes on; by default it is just starting.

    Attributes:
        failure: what ended the run, if it failed.
        stopped: why the run was stopped early, if it was.
        ended: whether the run is over.
        log: where it is told of lost workers.
    """

    def __init__(self, spec: RunSpec, now: float, restart: Restart | None = None) -> None:
        super().__init__(spec, now, restart)
        self.failure: SparkDLError | None = None
        self.stopped: str | None = None
        self.ended = False
        self.log = logger
        self._stop_wanted: str | None = None
        # Those that have finished and wait for a checkpoint to be written.
        self._leaving: dict[int, Member] = {}
        # How often the center has been updated, in all and before each rank was sent it.
        self._updates = 0
        self._sent: dict[int, int] = {}
        self._full_round = FullRound(spec.world_size, self.committed.progress().sums)
        self._said_waiting = now

    def heartbeat(self, member: Member, now: float) -> None:
        """Note that something arrived from a worker, or that it read something."""
        if not member.gone:
            self.members.note_heartbeat(member.rank, now)

    def restart(self) -> Restart:
        """What another run needs to go on after the last commit."""
        return Restart(
            progress=self.committed.progress(),
            saved=self.checkpoints.has_last_commit,
            kept=dict(self.committed.kept),
            validated=not self.committed.at_end_of_epoch,
        )

    @property
    def farewell(self) -> str:
        """Why the run is over, in words."""
        return f"the run ended: {self.failure or self.stopped or 'all workers have finished'}"

    # Joining, reading, starting.

    @event
    def joined(self, member: Member) -> None:
        """A worker has connected, for the first time or again."""
        rank = member.rank
        if rank in self.members.everyone and self.ranks[rank] is RankState.FINISHED:
            raise FencedError(f"rank {rank} has already finished its last epoch")
        before = self.members.join(member)
        if before is not None:
            self._lost(before, "was replaced before its connection was known to be lost")
            if self.ended:
                return
        self.ranks.move(rank, RankState.READING)
        checks.require_same_frozen(self, member)

    @event
    def rows_found(self, member: Member, shard: ShardStatistics, row_server: object = None) -> None:
        """A worker reports what it found in its rows.

        Args:
            member: the worker.
            shard: what it found.
            row_server: where others fetch its rows, for them to interpret; None if they do not.
        """
        rank = member.rank
        if rank in self.ranks.admitted:
            raise TrainingError(f"rank {rank} reported its rows twice")
        self.shards.row_servers[rank] = row_server
        statistics = self.shards.note(rank, shard)
        if statistics is not None:
            self.do.report(statistics)
        self.ranks.move(rank, RankState.READY)
        if not self.started:
            return
        if self.round.is_open and row_server is not None and self.round.awaits_anyone:
            # One of those awaited may have to fetch rows from this rank before it can contribute.
            self.do.start_over(self.round.start_over())
        if not self.round.is_open:
            self._admit()
        self._commit_if_complete()

    @event
    def expect_workers(self) -> None:
        """What workers wait for before they can start is making progress."""
        if len(self.members.joined) < self.spec.world_size:
            for rank in self.members.everyone - self.members.there:
                self.members.note_heartbeat(rank)

    @event
    def start(self, loss_use: str = "") -> None:
        """The driver has approved the rows' statistics: the workers may train.

        Args:
            loss_use: how they use the loss, for them to interpret.
        """
        if self.started:
            return
        self.started = True
        self.shards.loss_use = loss_use
        self.committed.start_epoch(self.members.now)
        self._admit()
        self.members.restart_clock()
        self.epoch_losses.news()

    @event
    def gave(self, member: Member, value: object) -> None:
        """A worker has given its part of a gather, and waits for the others' parts."""
        checks.require_admitted(self, member)
        checks.require_everyone(self, member, "takes part in an exchange among the workers")
        self.gathers.give(member, value)

    @event
    def want_commit(self) -> None:
        """Have workers that exchange among themselves commit after their next gather.

        All of them then learn of it at the same step.
        """
        self.committed.commit_wanted = True

    # Contributing.

    @event
    def window_closed(
        self,
        member: Member,
        report: WindowReport,
        kept: WorkerState | None = None,
        takes_reply: bool = True,
    ) -> None:
        """A worker is about to contribute; for the arguments see ``Window``."""
        checks.require_window_order(self, member, report)
        self.members.end_window(member.rank)
        self.round.policy.closed(report, self.members.now)
        self.round.hold(Window(member, report, kept, takes_reply))

    @event
    def taken(self, member: Member) -> None:
        """A worker has been sent the center, or the round's result."""
        if self.ranks[member.rank] is RankState.RECEIVING:
            self.ranks.move(member.rank, RankState.TRAINING)
            self.members.begin_window(member.rank)
        if not self.ranks.of(RankState.RECEIVING):
            self.members.pass_turn()

    def _enter_held(self) -> None:
        """Let those that wait contribute, as long as the sum may be added to."""
        while (window := self.round.next()) is not None:
            if not self.checkpoints.holds(window):
                self._enter(window)

    def _enter(self, window: Window) -> None:
        member, weight = window.member, window.report.weight
        if self.round.enter(window):
            self.do.open_sum(tuple(sorted(self.round.group)))
        if weight:
            self.do.receive(member, weight, self._staleness(member.rank))
        else:
            self.do.skip(member.rank)
        if not self.round.policy.in_step:
            self._leave_out()
        if not weight:
            self._contributed(member)

    def _leave_out(self) -> None:
        for rank in self.round.leave_out():
            self.do.skip(rank)

    def _contributed(self, member: Member) -> None:
        """A worker's contribution has been added to the sum."""
        if member.rank not in self.round.entered:
            return  # its last bytes arrived along with the loss that made everyone start over
        self.round.finish(member.rank)
        # Those waiting for their turn to add could not send anything.
        self.members.pass_turn()
        self._commit_if_complete()

    contributed = event(_contributed)

    # Committing.

    def _commit_if_complete(self) -> None:
        """Commit if everyone has contributed and enough workers are present."""
        present = len(self.ranks.admitted) + len(self.ranks.of(RankState.READY))
        if self.round.is_complete and present >= self.spec.tolerance.min_workers:
            self._commit()

    def _commit(self) -> None:
        """Make the round's sum the new center, and count its windows."""
        windows = self.round.commit()
        reports = [self._with_staleness(window) for window in windows]
        weights = tuple(weight for report in reports if (weight := report.weight))
        # Reports without weight have none.
        staleness = max((report.staleness for report in reports), default=0)
        share = 1.0 if self.round.policy.in_step else self._full_round.share(reports)
        self.do.commit(Contributions(weights, self.spec.world_size, staleness, share=share))
        self._updates += bool(weights)
        self.committed.commit(
            reports,
            {window.member.rank: window.kept for window in windows if window.kept is not None},
            self.members.now,
        )
        for report in reports:
            self.do.report(report)
        if self.spec.followed:
            self.do.report(RoundCommitted(self.committed.round, tuple(reports)))
        ends = not self.round.pending
        if ends:
            self._end_epoch()
        saves = self._save_if_due()
        self._admit(saves=saves, final=self.round.end_epoch() if ends else ())
        self.members.restart_clock()

    def _end_epoch(self) -> None:
        summary = self.committed.end_epoch(self.members.now)
        self._full_round.end_epoch()
        self.checkpoints.end_epoch(summary.epoch)
        self.do.report(summary)
        self.epoch_losses.news()

    def _save_if_due(self) -> bool:
        """Begin a checkpoint of the latest commit, if it is time; returns whether it is."""
        if not self.checkpoints.due:
            return False
        # Workers that come back later have another state.
        ranks = (window.member.rank for window in self.round.committed_windows)
        self.checkpoints.begin(ranks)
        self.do.begin_checkpoint(self.committed.progress(), self.shards.statistics)
        if not self.checkpoints.awaited:
            self.do.write_checkpoint()
        return True

    def _with_staleness(self, window: Window) -> WindowReport:
        """A window's report, with how often the center was updated meanwhile."""
        staleness, report = self._staleness(window.member.rank), window.report
        return replace(report, staleness=staleness) if staleness and report.weight else report

    def _staleness(self, rank: int) -> int:
        return self._updates - self._sent[rank]

    # Between two rounds.

    def _admit(self, *, saves: bool = False, final: Sequence[Window] = ()) -> None:
        """Let in whoever is ready, and let those go on that need not wait for others any more.

        Args:
            saves: whether the last commit becomes a checkpoint.
            final: the last windows of those that waited for the epoch's end.
        """
        let_in = self.to_let_in
        self.round.admit(let_in)
        for is_final, windows in ((False, self.round.release()), (True, final)):
            for window in windows:
                self._begin(window.member.rank)
                self.do.reply(
                    window.member,
                    final=is_final,
                    values=window.takes_reply,
                    worker_state=saves,
                )
        if saves and not final:
            for window in self.round.committed_windows:
                self.do.ask_worker_state(window.member)
        for rank in let_in:
            self.members.note_heartbeat(rank)
            self._begin(rank)
            self.do.welcome(self.members.of(rank))

    def _begin(self, rank: int) -> None:
        """Note that a rank is sent the center."""
        self._sent[rank] = self._updates
        self.round.policy.began(rank, self.members.now)

    # Epochs' losses.

    @event
    def validated(
        self, member: Member, report: ValidationReport, states: WorkerState | None = None
    ) -> None:
        """A worker reports the loss on its held-out rows, and what its metrics counted there."""
        checks.require_admitted(self, member)
        self.epoch_losses.validated(report, states)

    @event
    def epoch_losses_wanted(self, member: Member, known: int, epochs: int) -> None:
        """A worker that knows the losses of ``known`` epochs waits for those of ``epochs``."""
        checks.require_admitted(self, member)
        self.epoch_losses.want(member, known, epochs)

    @event
    def approve_epoch(self, epoch: int) -> None:
        """The driver has approved an epoch: workers that ask for leave may begin the next one."""
        self.epoch_losses.approve(epoch)

    @event
    def measured(self, epoch: int, values: Mapping[str, MetricValue]) -> None:
        """The driver has computed an epoch's metrics; the answer to ``run_events.EpochCounted``."""
        self.epoch_losses.measured(epoch, values)

    # Checkpoints.

    @event
    def preempt(self, reason: SparkDLError) -> None:
        """End the run with ``reason`` once a commit has become a checkpoint."""
        self.checkpoints.preempt(reason)

    def _worker_state_written(self, member: Member) -> None:
        """A worker's state is in the checkpoint that waited for it, or will never be."""
        if self.checkpoints.forgo(member.rank):
            self.do.write_checkpoint()

    worker_state_written = event(_worker_state_written)

    @event
    def checkpoint_ended(self, *, saved: bool) -> None:
        """The checkpoint that was being written exists, or has failed: nothing of it is left."""
        if saved and self.spec.followed:
            self.do.report(CheckpointSaved())
        told_to_end = self.checkpoints.finish(saved=saved)
        if told_to_end is not None:
            self._fail(told_to_end)
        elif self._stop_wanted is not None:
            self._stop(self._stop_wanted)
        else:
            for rank in self.ranks.of(RankState.CLOSED):
                self.members.note_heartbeat(rank)
            self._dismiss_leaving()
            self.round.requeue()

    # Losing, leaving, failing.

    def _lost(self, member: Member, why: str) -> None:
        """A worker is lost for everything under way; ``why`` follows its name in messages."""
        rank = member.rank
        if self.ranks[rank] is RankState.FINISHED:
            return
        error = self.members.lose(member, why)
        self.do.drop(member, why)
        if error is not None:
            self._fail(error)
            return
        self.log.warning(
            "%s; continuing with the others until it comes back", self.members.losses[-1]
        )
        if self.spec.followed:
            self.do.report(WorkerLost(rank, why))
        self.gathers.withdraw(rank)
        self.epoch_losses.wanted.pop(rank, None)
        missing = self.round.lose(rank)
        if missing is RankState.CONTRIBUTING:  # the sum holds part that will never be complete
            self.do.start_over(self.round.start_over())
        elif missing is not None:
            self.do.skip(rank)
            self._leave_out()
        if not self.round.is_open:
            self._admit()
        self._worker_state_written(member)
        # Those that waited for the lost one may have had nothing to send.
        self.members.restart_clock()
        self._commit_if_complete()

    lost = event(_lost)

    @event
    def finished(self, member: Member) -> None:
        """A worker has trained its last epoch."""
        if not member.gone:
            checks.require_admitted(self, member)
            checks.require_end_of_epoch(self, member)
        elif self.members.of(member.rank) is not member:
            return  # another worker has its place, and finishes for the rank
        self.ranks.move(member.rank, RankState.FINISHED)
        self._leaving[member.rank] = member
        if not self.checkpoints.under_way:
            self._dismiss_leaving()

    def _dismiss_leaving(self) -> None:
        leaving, self._leaving = self._leaving, {}
        for member in leaving.values():
            self.do.dismiss(member)
        if leaving and len(self.left) == self.spec.world_size:
            self._end()

    def _stop(self, reason: str) -> None:
        """End the run as it is, but only once a checkpoint being written exists.

        Args:
            reason: why, for logs.
        """
        self._stop_wanted = reason
        if not self.checkpoints.under_way:
            self.stopped = reason
            self._end()

    stop = event(_stop)

    def _fail(self, error: SparkDLError) -> None:
        """The run cannot go on; later failures are consequences of the first and are dropped."""
        # A driver that was told to end may see its workers fail too.
        self.failure = self.checkpoints.told_to_end or error
        self._end()

    fail = event(_fail)

    def _end(self) -> None:
        self.ended = True
        self.do.end(self.failure, self.stopped)

    def _refuse(self, member: Member, reason: str) -> None:
        member.gone = True
        self.do.refuse(member, reason)

    # The clock.

    @event
    def tick(self) -> None:
        """Time has passed; everything that arrived before has been reported."""
        if self.members.now - self._said_waiting >= self.spec.deadline_s / 4:
            self._say_waiting()
        self.checkpoints.require_in_time()
        drops = checks.drops(self)
        for rank, granted_s in drops.items():
            what = checks.what_is_missing(self, {rank})
            self.members.dropped.append(rank)
            self._lost(self.members.of(rank), f"{what} within {granted_s:.1f} s")
            if self.ended:
                return
        if drops:
            self.members.double_patience()

    def _say_waiting(self) -> None:
        self._said_waiting = self.members.now
        ready = {rank: self.members.of(rank) for rank in self.ranks.of(RankState.READY)}
        wanting = {rank: wanted[0] for rank, wanted in self.epoch_losses.wanted.items()}
        waiting = ready | self.gathers.waiting | self._leaving | self.round.waiting | wanting
        if waiting:
            self.do.say_waiting(tuple(waiting.values()))
