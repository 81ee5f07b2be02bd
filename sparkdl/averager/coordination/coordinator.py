"""What the averager decides: events with their times in, decisions out.

There is no lock, thread, socket or clock in here, so the same decisions serve two workers over TCP
and ten thousand in a simulation. A run goes like this:

    every worker     Joined, RowsFound                      -> the driver is told the statistics
    the driver       Started                                -> Welcome
    every worker     Taken, WindowClosed, Contributed, ...  -> Receive; Commit and Reply
    every worker     Finished                               -> End

Workers may be lost as often as the run tolerates, and come back: they continue after their last
committed window. The decisions of a round are in ``round_decisions``; this module decides on who
comes and goes, on what the driver says, and on how the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.arrivals import Arrivals
from sparkdl.averager.coordination.checkpointing import Checkpointing, Schedule
from sparkdl.averager.coordination.committed import CommittedProgress
from sparkdl.averager.coordination.conduct import Conduct
from sparkdl.averager.coordination.decisions import Decision
from sparkdl.averager.coordination.epoch_losses import EpochLosses
from sparkdl.averager.coordination.events import Event, Member
from sparkdl.averager.coordination.gathers import Gathers
from sparkdl.averager.coordination.lateness import Lateness
from sparkdl.averager.coordination.membership import FencedError, Membership, Tolerance
from sparkdl.averager.coordination.round import Round
from sparkdl.averager.coordination.round_decisions import RoundDecisions
from sparkdl.averager.coordination.shards import Shards
from sparkdl.averager.messages.progress import Progress
from sparkdl.averager.messages.run_events import CheckpointSaved, RunEvent, WorkerLost
from sparkdl.averager.messages.worker_state import WorkerState
from sparkdl.averager.policies.round_policy import All, RoundPolicy
from sparkdl.errors import SparkDLError

logger = logging.getLogger(__name__)


class Coordinator:
    """The decisions of one run.

    Args:
        world_size: number of workers.
        deadline_s: the longest for which a rank may be silent while it is waited for, and that
            writing a checkpoint may take, in seconds.
        now: the time, in seconds, by the same clock as in ``handle``.
        tolerance: which losses of workers the run survives; none by default.
        progress: how far the training has come already; by default it is just starting.
        kept: what was kept of each rank at its last commit; by default nothing.
        checkpoints: which commits become checkpoints; none by default.
        saved: whether a checkpoint holds the progress made so far, if there is any.
        resumed: whether the training resumes from a checkpoint, which may belong to other rows.
        frozen: the fingerprint that every worker's frozen parameters must have.
        policy: who is waited for in rounds; by default everyone.
        followed: whether callbacks follow the run: the driver is also told of rounds, lost workers
            and checkpoints, and workers begin an epoch only once it has approved the previous one.
        measures: whether the driver computes metrics from what the workers count on held-out rows;
            such a run is ``followed``.
        metric: the metric that workers want to know for each epoch, instead of the loss.

    Attributes:
        members: who is in the run.
        shards: what the workers found in their rows.
        round: who takes part in the round under way.
        committed: how far the training has come.
        checkpoints: the checkpoint being put together, and when the next is due.
        followed: as given.
        failure: what ended the run, if it failed.
        stopped: why the run was stopped early, if it was.
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
        # The ranks that have finished; and those of them that wait for a checkpoint to be written.
        self._done: set[int] = set()
        self._leaving: dict[int, Member] = {}
        self._gathers = Gathers(world_size)
        self._conduct = Conduct(
            self.members, self.round, self.committed, self._gathers, self._done, frozen
        )
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
        self._decided: list[Decision] = []
        self._arrivals = Arrivals(
            self.members, self.shards, self.committed, resumed=resumed, decide=self._decide
        )
        self._rounds = RoundDecisions(
            self.round,
            self.members,
            self._arrivals,
            self.shards,
            self.committed,
            self.checkpoints,
            self._epoch_losses,
            followed=followed,
            decide=self._decide,
        )
        self._said_waiting = now
        self._now = now
        self._handlers: dict[type, Callable[[Any], None]] = {
            on.Joined: self._joined,
            on.Lost: lambda event: self._lose(event.member, event.why),
            on.RowsFound: self._rows_found,
            on.Gave: self._gave,
            on.WindowClosed: self._window_closed,
            on.Contributed: lambda event: self._rounds.complete(event.member.rank, self._now),
            on.Taken: lambda event: self._rounds.take(event.member.rank, self._now),
            on.WorkerStateWritten: lambda event: self._do_without_worker_state(event.member.rank),
            on.Validated: self._validated,
            on.EpochLossesWanted: self._epoch_losses_wanted,
            on.EpochApproved: lambda event: self._tell(self._epoch_losses.approve(event.epoch)),
            on.EpochMeasured: lambda event: self._tell(self._epoch_losses.measured(event)),
            on.Finished: self._finish,
            on.Failed: lambda event: self._fail(event.error),
            on.Started: self._start,
            on.Approved: lambda event: self._arrivals.approve(event.rank, self._now),
            on.StopWanted: self._stop,
            on.CommitWanted: self._want_commit,
            on.Preempted: lambda event: self.checkpoints.preempt(event.reason),
            on.WorkersExpected: lambda event: self._arrivals.expect(self._now),
            on.CheckpointWritten: self._checkpoint_written,
            on.CheckpointGivenUp: lambda event: self._checkpoint_ended(saved=False),
            on.Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take note of an event, and decide what follows from it.

        Args:
            event: what has happened. From members that have lost their place only ``Finished``
                counts: they will not come back, because their work is done.
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
                if self.round.queue and not self.ended:
                    self._rounds.enter_held(now)
            except FencedError as error:
                assert member is not None
                self._refuse(member, str(error))
            except SparkDLError as error:
                self._fail(error)
        return self._decided

    def heartbeat(self, member: Member, now: float) -> None:
        """Take note that something arrived from a worker, or that it read something."""
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

    def _decide(self, decision: Decision) -> None:
        self._decided.append(decision)

    def _after_the_end(self, event: Event) -> None:
        if isinstance(event, on.Joined):
            self._refuse(event.member, self.farewell)
        elif isinstance(event, on.CheckpointWritten | on.CheckpointGivenUp):
            self.checkpoints.finish(saved=isinstance(event, on.CheckpointWritten))

    # Joining, reading, starting.

    def _joined(self, event: on.Joined) -> None:
        if event.member.rank in self._done:
            raise FencedError(f"rank {event.member.rank} has already finished its last epoch")
        before = self.members.join(event.member, self._now)
        if before is not None:
            self._lose(before, "was replaced before its connection was known to be lost")
        self._conduct.require_same_frozen(event.member)

    def _rows_found(self, event: on.RowsFound) -> None:
        if event.member.rank in self.round.admitted:
            self._arrivals.show(event)
        elif self._arrivals.read(event) and self._arrivals.started:
            self._rounds.knock(self._now, serves_rows=event.row_server is not None)

    def _start(self, event: on.Started) -> None:
        if self._arrivals.started:
            return
        self._arrivals.started = True
        self.shards.loss_use = event.loss_use
        self.committed.start_epoch(self._now)
        self._rounds.admit(self._now)
        self.members.restart_clock(self._now)
        self._tell(self._epoch_losses.news())

    def _gave(self, event: on.Gave) -> None:
        self._conduct.require_admitted(event.member)
        what = "takes part in an exchange among the workers"
        self._conduct.require_everyone(event.member, what)
        commit = self.committed.commit_wanted
        told = self._gathers.give(event.member, event.value, commit=commit)
        if told is not None:
            self.members.restart_clock(self._now)
            self._decide(told)

    def _want_commit(self, event: on.CommitWanted) -> None:
        """Ask for a commit with the next gather: all then learn of it at the same step."""
        self.committed.commit_wanted = True

    # Rounds.

    def _window_closed(self, event: on.WindowClosed) -> None:
        self._conduct.require_window_order(event)
        self._rounds.close_window(event, self._now)

    def _validated(self, event: on.Validated) -> None:
        self._conduct.require_admitted(event.member)
        self._tell(self._epoch_losses.validated(event))

    def _epoch_losses_wanted(self, event: on.EpochLossesWanted) -> None:
        self._conduct.require_admitted(event.member)
        self._tell(self._epoch_losses.want(event))

    def _tell(self, decisions: list[Decision]) -> None:
        """Tell driver and workers about epochs whose losses are now known."""
        self._decided.extend(decisions)
        if any(isinstance(decision, do.TellEpochLosses) for decision in decisions):
            self.members.restart_clock(self._now)

    # Checkpoints.

    def _do_without_worker_state(self, rank: int) -> None:
        """Take note that a rank's state has arrived, or never will."""
        if self.checkpoints.forgo(rank):
            self._decide(do.WriteCheckpoint())

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
            self._decide(do.Report(event))

    # Losing, leaving, failing.

    def _lose(self, member: Member, why: str) -> None:
        """Remove a worker from everything under way."""
        rank = member.rank
        if rank in self._done:
            return
        error = self.members.lose(member, why, self._now)
        self._decide(do.Drop(member, why))
        if error is not None:
            self._fail(error)
            return
        logger.warning(
            "%s; continuing with the others until it comes back", self.members.losses[-1]
        )
        self._tell_callbacks(WorkerLost(rank, why))
        self._arrivals.lose(rank)
        self._gathers.withdraw(rank)
        self._epoch_losses.wanted.pop(rank, None)
        self._rounds.lose(rank, self._now)
        self._do_without_worker_state(rank)
        # Those that waited for the lost one may have had nothing to send.
        self.members.restart_clock(self._now)
        self._rounds.commit_if_complete(self._now)

    def _finish(self, event: on.Finished) -> None:
        member = event.member
        if not member.gone:
            self._conduct.require_admitted(member)
            self._conduct.require_end_of_epoch(member)
        elif self.members.of(member.rank) is not member:
            return  # another worker has its place, and finishes for the rank
        self._done.add(member.rank)
        self._leaving[member.rank] = member
        if not self.checkpoints.under_way:
            self._dismiss_leaving()

    def _dismiss_leaving(self) -> None:
        self._decided.extend(map(do.Dismiss, self._leaving.values()))
        self._leaving = {}
        if self.ended:
            self._decide(do.End(None))

    def _stop(self, event: on.StopWanted) -> None:
        """End the run as it is, but only once a checkpoint being written exists."""
        self._stop_wanted = event
        if not self.checkpoints.under_way:
            self.stopped = event.reason
            self._decide(do.End(None, event.reason))

    def _fail(self, error: SparkDLError) -> None:
        # A driver that was told to end may see its workers fail too.
        self.failure = self.checkpoints.told_to_end or error
        self._decide(do.End(self.failure))

    def _refuse(self, member: Member, reason: str) -> None:
        member.gone = True
        self._decide(do.Refuse(member, reason))

    # The clock.

    def _tick(self, event: on.Tick) -> None:
        if self._now - self._said_waiting >= self.members.deadline_s / 4:
            self._say_waiting()
        self.checkpoints.require_in_time(self.members, self._now)
        drops = self._lateness.drops(self._now, started=self._arrivals.started, done=self._done)
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
        arriving = self._arrivals.ready | self._arrivals.shown
        wanting = {rank: event.member for rank, event in self._epoch_losses.wanted.items()}
        waiting = arriving | self._gathers.waiting | self._leaving | self.round.waiting | wanting
        if waiting:
            self._decide(do.SayWaiting(tuple(waiting.values())))
