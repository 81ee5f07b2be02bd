"""What the averager decides: events with a time in, decisions out.

No lock, thread, socket or clock is in here, so that the same decisions serve two workers over TCP
and ten thousand in a simulation. One run goes like this:

    every worker     Joined, RowsFound                      -> the driver is told the statistics
    the driver       Started                                -> Welcome
    every worker     Taken, WindowClosed, Contributed, ...  -> Receive; Commit and Reply
    every worker     Finished                               -> End

Workers may be lost as often as the run tolerates. Rounds go on without them; a round that had part
of a lost worker's contribution starts over from what the others still hold. Positions count only
what was committed, and an epoch ends when every rank is through with it, so that a worker that
comes back continues after its last committed window, and no row is counted twice.

A round behind which a checkpoint is due waits for the one that is being written. A checkpoint has
the worker states of those who stand where it says: who contributed to its commit, and who waits for
the epoch's end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.checkpointing import Checkpointing, Schedule
from sparkdl.averager.coordination.committed import CommittedProgress
from sparkdl.averager.coordination.conduct import Conduct
from sparkdl.averager.coordination.decisions import Decision
from sparkdl.averager.coordination.epoch_losses import EpochLosses
from sparkdl.averager.coordination.events import Event, Member
from sparkdl.averager.coordination.gathers import Gathers
from sparkdl.averager.coordination.lateness import Lateness
from sparkdl.averager.coordination.membership import FencedError, Membership, Tolerance
from sparkdl.averager.coordination.round import Loss, Round
from sparkdl.averager.coordination.shards import Shards
from sparkdl.averager.messages.progress import Position, Progress
from sparkdl.averager.messages.run_events import (
    CheckpointSaved,
    NewRows,
    RoundCommitted,
    RunEvent,
    WorkerLost,
)
from sparkdl.averager.messages.worker_state import WorkerState
from sparkdl.averager.policies.round_policy import All, RoundPolicy
from sparkdl.averager.values.center_update import Contributions
from sparkdl.errors import SparkDLError, TrainingError
from sparkdl.events import WindowReport
from sparkdl.feed.statistics import ShardStatistics

logger = logging.getLogger(__name__)


class Coordinator:
    """The decisions of one run.

    Args:
        world_size: number of workers.
        deadline_s: the longest that a rank may be silent while it is waited for, and a checkpoint
            be written, in seconds.
        now: the time, in seconds; of the same clock as in ``handle``.
        tolerance: what losses the run survives; none by default.
        progress: how far the training has come already; by default it starts.
        kept: what was kept of each rank at its last commit; by default nothing.
        checkpoints: which commits become checkpoints; none by default.
        saved: whether a checkpoint has what ``progress`` says, if that is anything.
        resumed: whether the training resumes from a checkpoint, which may be of other rows.
        frozen: the fingerprint that the frozen parameters of every worker are to have.
        policy: who is waited for in rounds; by default everyone.
        followed: whether callbacks follow the run: the driver is told of rounds, losses of workers
            and checkpoints too, and workers begin an epoch when it has approved the one before.
        measures: whether the driver computes metrics of what the workers count on held-out rows;
            such a run is ``followed``.
        metric: the metric that workers want to know of each epoch, instead of the loss.

    Attributes:
        members: who is in the run.
        shards: what they have found in their rows.
        round: who takes part in the round that is under way.
        committed: how far the training has come.
        checkpoints: the one that is being put together, and when the next is due.
        followed: as given.
        failure: what has ended the run, if it failed.
        stopped: why it was stopped before its end, if it was.
        ended: whether the run is over.
    """

    def __init__(
        self,
        world_size: int,
        deadline_s: float,
        now: float,
        *,
        tolerance: Tolerance | None = None,
        progress: Progress | None = None,
        kept: Mapping[int, WorkerState] | None = None,
        checkpoints: Schedule | None = None,
        saved: bool = True,
        resumed: bool = False,
        frozen: str = "",
        policy: RoundPolicy | None = None,
        followed: bool = False,
        measures: bool = False,
        metric: str | None = None,
    ) -> None:
        self.members = Membership(world_size, deadline_s, tolerance or Tolerance(), now)
        self.shards = Shards(world_size)
        self.committed = CommittedProgress(
            progress or Progress.start(world_size), kept or {}, now=now
        )
        policy = policy or All()
        policy.begin(self.committed.positions)
        self.round = Round(self.members.everyone, policy)
        self.checkpoints = Checkpointing(checkpoints, self.committed, saved=saved)
        self.followed = followed
        self.failure: SparkDLError | None = None
        self.stopped: str | None = None
        self._stop_wanted: on.StopWanted | None = None
        self._commit_wanted = False
        self._gathers = Gathers(world_size)
        self._conduct = Conduct(self.members, self.round, self.committed, self._gathers, frozen)
        self._epoch_losses = EpochLosses(
            self.committed, self.shards, followed=followed, measures=measures, metric=metric
        )
        self._lateness = Lateness(
            self.members,
            self.shards,
            self._gathers,
            self.round,
            self.committed,
            self.checkpoints,
            self._epoch_losses.wanted,
        )
        self._started = False
        # Who has read its rows and waits to be let in.
        self._ready: dict[int, Member] = {}
        # Who waits for the driver to look at rows, and who for what all others give.
        self._shown: dict[int, Member] = {}
        self._giving: dict[int, Member] = {}
        # Who has finished; and who of those waits for a checkpoint that is being written.
        self._done: set[int] = set()
        self._leaving: dict[int, Member] = {}
        self._resumed = resumed
        # How often the center was updated; and had been when each rank was sent it.
        self._updates = 0
        self._sent: dict[int, int] = {}
        self._said_waiting = now
        self._now = now
        self._decided: list[Decision] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            on.Joined: self._joined,
            on.Lost: lambda event: self._lose(event.member, event.why),
            on.RowsFound: self._rows_found,
            on.Gave: self._gave,
            on.WindowClosed: self._window_closed,
            on.Contributed: lambda event: self._complete(event.member.rank),
            on.Taken: self._taken,
            on.WorkerStateWritten: lambda event: self._do_without_worker_state(event.member.rank),
            on.Validated: self._validated,
            on.EpochLossesWanted: self._epoch_losses_wanted,
            on.EpochApproved: lambda event: self._tell(self._epoch_losses.approve(event.epoch)),
            on.EpochMeasured: lambda event: self._tell(self._epoch_losses.measured(event)),
            on.Finished: self._finish,
            on.Failed: lambda event: self._fail(event.error),
            on.Started: self._start,
            on.Approved: self._approved,
            on.StopWanted: self._stop,
            on.CommitWanted: self._want_commit,
            on.Preempted: lambda event: self.checkpoints.preempt(event.reason),
            on.WorkersExpected: self._workers_expected,
            on.CheckpointWritten: self._checkpoint_written,
            on.CheckpointGivenUp: lambda event: self._checkpoint_ended(saved=False),
            on.Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take note of an event, and decide what follows from it.

        Args:
            event: what has happened. Of members that have lost their place only ``Finished`` says
                something: they will not come back, for their work is done.
            now: when, in seconds; never less than in the call before.

        Returns:
            What is to be done, in this order.
        """
        self._now = now
        self._decided = []
        if self.members.look(now):
            self.checkpoints.restart_clock(now)
        member: Member | None = getattr(event, "member", None)
        if self.ended:
            self._after_the_end(event)
        elif member is None or not member.gone or isinstance(event, on.Finished):
            if member is not None and not isinstance(event, on.Joined):
                self.members.note_heartbeat(member.rank, now)
            try:
                self._handlers[type(event)](event)
                if self.round.queue:
                    self._enter_held()
            except FencedError as error:
                assert member is not None
                self._refuse(member, str(error))
            except SparkDLError as error:
                self._fail(error)
        return self._decided

    def heartbeat(self, member: Member, now: float) -> None:
        """Take note that something of a worker arrived, or that it took something."""
        if not member.gone:
            self.members.note_heartbeat(member.rank, now)

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        done = len(self._done) == self.members.world_size and not self._leaving
        return self.failure is not None or self.stopped is not None or done

    @property
    def farewell(self) -> str:
        """Why the run is over, in words."""
        return f"the run ended: {self.failure or self.stopped or 'all workers have finished'}"

    def _after_the_end(self, event: Event) -> None:
        if isinstance(event, on.Joined):
            self._refuse(event.member, self.farewell)
        elif isinstance(event, on.CheckpointWritten | on.CheckpointGivenUp):
            self.checkpoints.finish(saved=isinstance(event, on.CheckpointWritten))

    # Joining, reading, starting.

    def _joined(self, event: on.Joined) -> None:
        if event.member.rank in self._done:
            raise FencedError(f"rank {event.member.rank} has finished its last epoch already")
        before = self.members.join(event.member, self._now)
        if before is not None:
            self._lose(before, "was replaced before its connection was known to be lost")
        self._conduct.require_same_frozen(event.member)

    def _rows_found(self, event: on.RowsFound) -> None:
        member, shard = event.member, event.shard
        rank = member.rank
        if rank in self.round.admitted:
            if not self.members.reads(rank):
                raise TrainingError(f"rank {rank} said a second time what its rows are")
            self._note_shard(rank, shard)
            self._shown[rank] = member
            self._decided.append(do.Report(NewRows(rank, shard)))
            return
        self.shards.row_servers[rank] = event.row_server
        begins = not self._resumed and self.committed.positions[rank] == Position()
        if not shard.complete and not begins:
            self._decided.append(do.ReadOn(member))
            return
        self._note_shard(rank, shard)
        self._ready[rank] = member
        if self._started:
            if self.round.is_open and event.row_server is not None and self.round.awaits_anyone:
                # One of those may have to fetch rows of this rank before it can contribute.
                self._decided.append(do.StartOver(self.round.start_over()))
            if not self.round.is_open:
                self._admit()
            self._commit_if_complete()

    def _note_shard(self, rank: int, shard: ShardStatistics) -> None:
        news = self.shards.note(rank, shard)
        self.members.note_reading(rank, reading=not shard.complete)
        if news is not None:
            self._decided.append(do.Report(news))

    def _start(self, event: on.Started) -> None:
        if self._started:
            return
        self._started = True
        self.committed.start_epoch(self._now)
        self._admit()
        self.members.restart_clock(self._now)
        self._tell(self._epoch_losses.news())

    def _approved(self, event: on.Approved) -> None:
        member = self._shown.pop(event.rank, None)
        if member is not None:
            self.members.note_heartbeat(event.rank, self._now)
            self._decided.append(do.GoOn(member))

    def _admit(self, *, saves: bool = False, final: Sequence[on.WindowClosed] = ()) -> None:
        """Let those in who came back, and those go on who need not wait for others any more.

        Args:
            saves: whether the last commit becomes a checkpoint.
            final: the last windows of those who have waited for the epoch's end.
        """
        knocking = sorted(self._knocking)
        self.round.admit(knocking)
        for is_final, windows in ((False, self.round.release()), (True, final)):
            for window in windows:
                self._begin(window.member.rank)
                reply = do.Reply(window.member, is_final, window.takes_reply, saves)
                self._decided.append(reply)
        if saves and not final:
            waiting = chain(self.round.at_barrier.values(), self.round.through.values())
            self._decided.extend(do.AskWorkerState(window.member) for window in waiting)
        for rank in knocking:
            self.members.note_heartbeat(rank, self._now)
            self._begin(rank)
            self._decided.append(do.Welcome(self._ready.pop(rank)))

    @property
    def _knocking(self) -> set[int]:
        """Who is let in as soon as no sum is under way."""
        return set(self._ready) if self._started else set()

    def _begin(self, rank: int) -> None:
        """Take note that a rank is sent the center."""
        self._sent[rank] = self._updates
        self.round.policy.began(rank, self._now)

    def _workers_expected(self, event: on.WorkersExpected) -> None:
        if self.members.joined < self.members.world_size:
            for rank in self.members.everyone - self.members.there:
                self.members.note_heartbeat(rank, self._now)

    def _gave(self, event: on.Gave) -> None:
        self._conduct.require_admitted(event.member)
        what = "takes part in what the workers exchange among themselves"
        self._conduct.require_everyone(event.member, what, self._done)
        if event.member.rank in self._giving:
            raise TrainingError(f"{event.member} gave twice before all others had given once")
        self._giving[event.member.rank] = event.member
        values = self._gathers.give(event.member.rank, event.value)
        if values is not None:
            members, self._giving = tuple(self._giving.values()), {}
            self.members.restart_clock(self._now)
            self._decided.append(do.Tell(members, values, self._commit_wanted))

    def _want_commit(self, event: on.CommitWanted) -> None:
        """Ask for one in what the workers are told next: they all learn of it at the same step."""
        self._commit_wanted = True

    # Rounds.

    def _window_closed(self, event: on.WindowClosed) -> None:
        member, report = event.member, event.report
        rank = member.rank
        self._conduct.require_admitted(member)
        if rank in self.round.held:
            raise TrainingError(f"{member} closed a window twice")
        self.members.end_window(rank, self._now)
        what = f"contributed a window of epoch {report.epoch}"
        self._conduct.require_everyone(member, what, self._done)
        self._conduct.require_turn(event)
        self.round.policy.closed(report, self._now)
        self.round.hold(event)

    def _enter_held(self) -> None:
        """Let in who is about to contribute, as long as the sum may be added to."""
        while not self.ended and (window := self.round.next()) is not None:
            if not self.checkpoints.holds(window):
                self._enter(window)

    def _enter(self, window: on.WindowClosed) -> None:
        member, weight = window.member, window.report.weight
        if self.round.enter(window):
            self._decided.append(do.OpenSum(tuple(sorted(self.round.group))))
        staleness = self._staleness(member.rank)
        receive = do.Receive(member, weight, staleness)
        self._decided.append(receive if weight else do.Skip(member.rank))
        if not self.round.policy.in_step:
            self._decided.extend(map(do.Skip, self.round.leave_out()))
        if not weight:
            self._complete(member.rank)

    def _complete(self, rank: int) -> None:
        self.round.finish(rank)
        # Who waited for its turn to add could not be heard of.
        self.members.pass_turn(self._now)
        self._commit_if_complete()

    def _commit_if_complete(self) -> None:
        enough = len(self.round.admitted) + len(self._knocking)
        if self.round.is_complete and enough >= self.members.tolerance.min_workers:
            self._commit()

    def _commit(self) -> None:
        """Make the round's sum the new center, and its windows happen."""
        windows, self._commit_wanted = self.round.commit(), False
        reports = [self._with_staleness(window) for window in windows]
        weighted = [report for report in reports if report.weight]
        weights = tuple(report.weight for report in weighted)
        staleness = max((report.staleness for report in weighted), default=0)
        self._decided.append(do.Commit(Contributions(weights, self.members.world_size, staleness)))
        self._updates += bool(weights)
        self.committed.commit(
            reports,
            {window.member.rank: window.kept for window in windows if window.kept is not None},
        )
        self._decided.extend(map(do.Report, reports))
        self._tell_callbacks(RoundCommitted(self.committed.round, tuple(reports)))
        waiting = [*self.round.at_barrier.values(), *self.round.through.values()]
        final: list[on.WindowClosed] = []
        if not self.round.pending:
            summary = self.committed.end_epoch(self._now)
            self._decided.append(do.Report(summary))
            self.checkpoints.end_epoch(summary.epoch)
            self._tell(self._epoch_losses.news())
            final = self.round.end_epoch()
        self._admit(saves=self._save_if_due(waiting), final=final)
        self.members.restart_clock(self._now)

    def _with_staleness(self, window: on.WindowClosed) -> WindowReport:
        """A window's report, with how often the center was updated while it was trained."""
        staleness = self._staleness(window.member.rank) if window.report.weight else 0
        return replace(window.report, staleness=staleness) if staleness else window.report

    def _staleness(self, rank: int) -> int:
        return self._updates - self._sent[rank]

    def _taken(self, event: on.Taken) -> None:
        readers = self.round.readers
        readers.discard(event.member.rank)
        self.members.begin_window(event.member.rank, self._now)
        if not readers:
            self.members.pass_turn(self._now)

    def _validated(self, event: on.Validated) -> None:
        self._conduct.require_admitted(event.member)
        self._tell(self._epoch_losses.validated(event))

    def _epoch_losses_wanted(self, event: on.EpochLossesWanted) -> None:
        self._conduct.require_admitted(event.member)
        self._tell(self._epoch_losses.want(event))

    def _tell(self, decisions: Sequence[Decision]) -> None:
        """Tell driver and workers of epochs of which it is known now what they came to."""
        self._decided.extend(decisions)
        if any(isinstance(decision, do.TellEpochLosses) for decision in decisions):
            self.members.restart_clock(self._now)

    # Checkpoints.

    def _save_if_due(self, windows: Iterable[on.WindowClosed]) -> bool:
        """Begin a checkpoint behind the commit that has just been, if it is time.

        Args:
            windows: the last ones of those who stand where the commit says.
        """
        if not self.checkpoints.begin_if_due(windows, self._now):
            return False
        progress = self.committed.progress()
        self._decided.append(do.BeginCheckpoint(progress, self.shards.statistics))
        if not self.checkpoints.awaited:
            self._decided.append(do.WriteCheckpoint())
        return True

    def _do_without_worker_state(self, rank: int) -> None:
        """Take note that a rank's state has come, or never will."""
        if self.checkpoints.forgo(rank):
            self._decided.append(do.WriteCheckpoint())

    def _checkpoint_written(self, event: on.CheckpointWritten) -> None:
        self._tell_callbacks(CheckpointSaved())
        self._checkpoint_ended(saved=True)

    def _checkpoint_ended(self, *, saved: bool) -> None:
        told_to_end = self.checkpoints.finish(saved=saved)
        if told_to_end is not None:
            self._fail(told_to_end)
            return
        if self._stop_wanted is not None:
            self._stop(self._stop_wanted)
            return
        for rank in self.round.held:
            self.members.note_heartbeat(rank, self._now)
        if self._leaving:
            self._dismiss_leaving()
        self.round.requeue()

    def _tell_callbacks(self, event: RunEvent) -> None:
        if self.followed:
            self._decided.append(do.Report(event))

    # Losing, leaving, failing.

    def _lose(self, member: Member, why: str) -> None:
        """Take a worker out of everything that is under way."""
        rank = member.rank
        if rank in self._done:
            return
        error = self.members.lose(member, why, self._now)
        self._decided.append(do.Drop(member, why))
        if error is not None:
            self._fail(error)
            return
        logger.warning("%s; going on with the others until it comes back", self.members.losses[-1])
        self._tell_callbacks(WorkerLost(rank, why))
        for waiting in (self._ready, self._shown, self._giving, self._epoch_losses.wanted):
            waiting.pop(rank, None)
        self._gathers.withdraw(rank)
        loss = self.round.lose(rank)
        if loss is Loss.BROKEN:
            self._decided.append(do.StartOver(self.round.start_over()))
        elif loss is Loss.SKIPPED:
            self._decided.extend(map(do.Skip, [rank, *self.round.leave_out()]))
        if not self.round.is_open:
            self._admit()
        self._do_without_worker_state(rank)
        # Who waited for the lost one could not be heard of.
        self.members.restart_clock(self._now)
        self._commit_if_complete()

    def _finish(self, event: on.Finished) -> None:
        member = event.member
        if not member.gone:
            self._conduct.require_admitted(member)
            self._conduct.require_end_of_epoch(member)
        elif self.members.of(member.rank) is not member:
            return  # another has its place, and finishes for the rank
        self._done.add(member.rank)
        self._leaving[member.rank] = member
        if not self.checkpoints.under_way:
            self._dismiss_leaving()

    def _dismiss_leaving(self) -> None:
        self._decided.extend(map(do.Dismiss, self._leaving.values()))
        self._leaving = {}
        if self.ended:
            self._decided.append(do.End(None))

    def _stop(self, event: on.StopWanted) -> None:
        """End the run as it is; with a checkpoint that is being written, once it is there."""
        self._stop_wanted = event
        if not self.checkpoints.under_way:
            self.stopped = event.reason
            self._decided.append(do.End(None, event.reason))

    def _fail(self, error: SparkDLError) -> None:
        # Who was told to end may see the workers end too.
        self.failure = self.checkpoints.told_to_end or error
        self._decided.append(do.End(self.failure))

    def _refuse(self, member: Member, reason: str) -> None:
        member.gone = True
        self._decided.append(do.Refuse(member, reason))

    # The clock.

    def _tick(self, event: on.Tick) -> None:
        if self._now - self._said_waiting >= self.members.deadline_s / 4:
            self._say_waiting()
        self.checkpoints.require_in_time(self.members, self._now)
        drops = self._lateness.drops(self._now, started=self._started, done=self._done)
        for rank, granted_s in drops.items():
            what = self._lateness.what_is_missing({rank}, started=True)
            self.members.dropped.append(rank)
            self._lose(self.members.of(rank), f"{what} within {granted_s:.1f} s")
            if self.ended:
                return
        if drops:
            self.members.double_patience()

    def _say_waiting(self) -> None:
        self._said_waiting = self._now
        # Others may train for longer than a contribution may take.
        windows = self.round.behind_others | self.round.at_barrier | self.round.through
        through = {rank: w.member for rank, w in windows.items() if not w.member.gone}
        wanting = {rank: event.member for rank, event in self._epoch_losses.wanted.items()}
        waiting = self._ready | self._shown | self._giving | self._leaving | through | wanting
        if not self.round.policy.in_step:
            waiting |= {rank: window.member for rank, window in self.round.kept_out.items()}
        if waiting:
            self._decided.append(do.SayWaiting(tuple(waiting.values())))
