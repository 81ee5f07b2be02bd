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
from collections.abc import Callable
from typing import Any

from sparkdl.averager.coordination import checks
from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.decisions import Decision
from sparkdl.averager.coordination.events import Event, Member
from sparkdl.averager.coordination.membership import FencedError
from sparkdl.averager.coordination.rank_states import Move, RankState
from sparkdl.averager.coordination.round_decisions import RoundDecisions
from sparkdl.averager.coordination.run_state import Restart, RunSpec, RunState
from sparkdl.averager.messages.run_events import CheckpointSaved, RunEvent, WorkerLost
from sparkdl.errors import SparkDLError, TrainingError

logger = logging.getLogger(__name__)


class Coordinator:
    """The decisions of one run.

    Args:
        spec: how it was planned.
        now: the time, in seconds, by the same clock as in ``handle``.
        restart: where it goes on; by default it is just starting.

    Attributes:
        state: how the run stands; also ``members``, ``shards``, ``round``, ``committed`` and
            ``checkpoints`` of it.
        followed: whether callbacks follow the run.
        failure: what ended the run, if it failed.
        stopped: why the run was stopped early, if it was.
        ended: whether the run is over.
        log: where it is told of lost workers.
    """

    def __init__(self, spec: RunSpec, now: float, restart: Restart | None = None) -> None:
        self.state = RunState(spec, now, restart or Restart())
        self.members = self.state.members
        self.shards = self.state.shards
        self.round = self.state.round
        self.committed = self.state.committed
        self.checkpoints = self.state.checkpoints
        self.followed = spec.followed
        self.failure: SparkDLError | None = None
        self.stopped: str | None = None
        self.ended = False
        self.log = logger
        self._stop_wanted: on.StopWanted | None = None
        self._ranks = self.state.ranks
        # Those that have finished and wait for a checkpoint to be written.
        self._leaving: dict[int, Member] = {}
        self._gathers = self.state.gathers
        self._epoch_losses = self.state.epoch_losses
        self._rounds = RoundDecisions(self.state)
        self._said_waiting = now
        self._now = now
        self._handlers: dict[type, Callable[[Any], list[Decision]]] = {
            on.Joined: self._joined,
            on.Lost: lambda event: self._lose(event.member, event.why),
            on.RowsFound: self._rows_found,
            on.Gave: self._gave,
            on.WindowClosed: self._window_closed,
            on.Contributed: lambda event: self._rounds.complete(event.member.rank, self._now),
            on.Taken: self._taken,
            on.WorkerStateWritten: lambda event: self._do_without_worker_state(event.member.rank),
            on.Validated: self._validated,
            on.EpochLossesWanted: self._epoch_losses_wanted,
            on.EpochApproved: lambda event: self._tell(self._epoch_losses.approve(event.epoch)),
            on.EpochMeasured: lambda event: self._tell(self._epoch_losses.measured(event)),
            on.Finished: self._finish,
            on.Failed: lambda event: self._fail(event.error),
            on.Started: self._start,
            on.StopWanted: self._stop,
            on.CommitWanted: self._want_commit,
            on.Preempted: self._preempt,
            on.WorkersExpected: self._expect_workers,
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
        if self.members.look(now):
            self.checkpoints.restart_clock(now)
        member: Member | None = getattr(event, "member", None)
        if self.ended:
            return self._after_the_end(event)
        if member is not None and not isinstance(event, on.Joined):
            if member.gone and not isinstance(event, on.Finished):
                return []
            self.members.note_heartbeat(member.rank, now)
        decided: list[Decision] = []
        try:
            decided = self._handlers[type(event)](event)
            if self.round.queue and not self.ended:
                decided += self._rounds.enter_held(now)
        except FencedError as error:
            assert member is not None
            decided += self._refuse(member, str(error))
        except SparkDLError as error:
            decided += self._fail(error)
        return decided

    def heartbeat(self, member: Member, now: float) -> None:
        """Take note that something arrived from a worker, or that it read something."""
        if not member.gone:
            self.members.note_heartbeat(member.rank, now)

    def restart(self) -> Restart:
        """What another run needs to go on after the last commit."""
        return Restart(
            progress=self.committed.progress(),
            saved=self.checkpoints.has_last_commit,
            kept=dict(self.committed.kept),
        )

    @property
    def farewell(self) -> str:
        """Why the run is over, in words."""
        return f"the run ended: {self.failure or self.stopped or 'all workers have finished'}"

    def _after_the_end(self, event: Event) -> list[Decision]:
        if isinstance(event, on.Joined):
            return self._refuse(event.member, self.farewell)
        if isinstance(event, on.CheckpointWritten | on.CheckpointGivenUp):
            self.checkpoints.finish(saved=isinstance(event, on.CheckpointWritten))
        return []

    # Joining, reading, starting.

    def _joined(self, event: on.Joined) -> list[Decision]:
        rank = event.member.rank
        if rank in self.members.everyone and self._ranks[rank] is RankState.FINISHED:
            raise FencedError(f"rank {rank} has already finished its last epoch")
        before = self.members.join(event.member, self._now)
        decided: list[Decision] = []
        if before is not None:
            why = "was replaced before its connection was known to be lost"
            decided = self._lose(before, why)
            if self.ended:
                return decided
        self._ranks.move(rank, Move.JOIN)
        checks.require_same_frozen(self.state, event.member)
        return decided

    def _rows_found(self, event: on.RowsFound) -> list[Decision]:
        rank = event.member.rank
        if rank in self._ranks.admitted:
            raise TrainingError(f"rank {rank} reported its rows twice")
        self.shards.row_servers[rank] = event.row_server
        news = self.shards.note(rank, event.shard)
        decided: list[Decision] = [] if news is None else [do.Report(news)]
        self._ranks.move(rank, Move.READ)
        if self.state.started:
            serves_rows = event.row_server is not None
            decided += self._rounds.admit_when_possible(self._now, serves_rows=serves_rows)
        return decided

    def _expect_workers(self, event: on.WorkersExpected) -> list[Decision]:
        if self.members.joined < self.members.world_size:
            for rank in self.members.everyone - self.members.there:
                self.members.note_heartbeat(rank, self._now)
        return []

    def _start(self, event: on.Started) -> list[Decision]:
        if self.state.started:
            return []
        self.state.started = True
        self.shards.loss_use = event.loss_use
        self.committed.start_epoch(self._now)
        decided = self._rounds.admit(self._now)
        self.members.restart_clock(self._now)
        return decided + self._tell(self._epoch_losses.news())

    def _gave(self, event: on.Gave) -> list[Decision]:
        checks.require_admitted(self.state, event.member)
        what = "takes part in an exchange among the workers"
        checks.require_everyone(self.state, event.member, what)
        commit = self.committed.commit_wanted
        told = self._gathers.give(event.member, event.value, commit=commit)
        if told is None:
            return []
        self.members.restart_clock(self._now)
        return [told]

    def _want_commit(self, event: on.CommitWanted) -> list[Decision]:
        """Ask for a commit with the next gather: all then learn of it at the same step."""
        self.committed.commit_wanted = True
        return []

    # Rounds.

    def _window_closed(self, event: on.WindowClosed) -> list[Decision]:
        checks.require_window_order(self.state, event)
        self._rounds.close_window(event, self._now)
        return []

    def _taken(self, event: on.Taken) -> list[Decision]:
        self._rounds.take(event.member.rank, self._now)
        return []

    def _validated(self, event: on.Validated) -> list[Decision]:
        checks.require_admitted(self.state, event.member)
        return self._tell(self._epoch_losses.validated(event))

    def _epoch_losses_wanted(self, event: on.EpochLossesWanted) -> list[Decision]:
        checks.require_admitted(self.state, event.member)
        return self._tell(self._epoch_losses.want(event))

    def _tell(self, decisions: list[Decision]) -> list[Decision]:
        """Tell driver and workers about epochs whose losses are now known."""
        if any(isinstance(decision, do.TellEpochLosses) for decision in decisions):
            self.members.restart_clock(self._now)
        return decisions

    # Checkpoints.

    def _preempt(self, event: on.Preempted) -> list[Decision]:
        self.checkpoints.preempt(event.reason)
        return []

    def _do_without_worker_state(self, rank: int) -> list[Decision]:
        """Take note that a rank's state has arrived, or never will."""
        return [do.WriteCheckpoint()] if self.checkpoints.forgo(rank) else []

    def _checkpoint_written(self, event: on.CheckpointWritten) -> list[Decision]:
        return self._for_callbacks(CheckpointSaved()) + self._checkpoint_ended(saved=True)

    def _checkpoint_ended(self, *, saved: bool) -> list[Decision]:
        told_to_end = self.checkpoints.finish(saved=saved)
        if told_to_end is not None:
            return self._fail(told_to_end)
        if self._stop_wanted is not None:
            return self._stop(self._stop_wanted)
        for rank in self._ranks.of(RankState.CLOSED):
            self.members.note_heartbeat(rank, self._now)
        decided = self._dismiss_leaving() if self._leaving else []
        self.round.requeue()
        return decided

    def _for_callbacks(self, event: RunEvent) -> list[Decision]:
        return [do.Report(event)] if self.followed else []

    # Losing, leaving, failing.

    def _lose(self, member: Member, why: str) -> list[Decision]:
        """Remove a worker from everything under way."""
        rank = member.rank
        if self._ranks[rank] is RankState.FINISHED:
            return []
        error = self.members.lose(member, why, self._now)
        if error is not None:
            return [do.Drop(member, why), *self._fail(error)]
        self.log.warning(
            "%s; continuing with the others until it comes back", self.members.losses[-1]
        )
        decided = [do.Drop(member, why), *self._for_callbacks(WorkerLost(rank, why))]
        self._gathers.withdraw(rank)
        self._epoch_losses.wanted.pop(rank, None)
        decided += self._rounds.lose(rank, self._now)
        decided += self._do_without_worker_state(rank)
        # Those that waited for the lost one may have had nothing to send.
        self.members.restart_clock(self._now)
        return decided + self._rounds.commit_if_complete(self._now)

    def _finish(self, event: on.Finished) -> list[Decision]:
        member = event.member
        if not member.gone:
            checks.require_admitted(self.state, member)
            checks.require_end_of_epoch(self.state, member)
        elif self.members.of(member.rank) is not member:
            return []  # another worker has its place, and finishes for the rank
        self._ranks.move(member.rank, Move.FINISH)
        self._leaving[member.rank] = member
        return [] if self.checkpoints.under_way else self._dismiss_leaving()

    def _dismiss_leaving(self) -> list[Decision]:
        decided: list[Decision] = [do.Dismiss(member) for member in self._leaving.values()]
        self._leaving = {}
        finished = len(self._ranks.of(RankState.FINISHED)) == self.members.world_size
        return [*decided, self._end()] if finished else decided

    def _stop(self, event: on.StopWanted) -> list[Decision]:
        """End the run as it is, but only once a checkpoint being written exists."""
        self._stop_wanted = event
        if self.checkpoints.under_way:
            return []
        self.stopped = event.reason
        return [self._end()]

    def _fail(self, error: SparkDLError) -> list[Decision]:
        # A driver that was told to end may see its workers fail too.
        self.failure = self.checkpoints.told_to_end or error
        return [self._end()]

    def _end(self) -> Decision:
        self.ended = True
        return do.End(self.failure, self.stopped)

    def _refuse(self, member: Member, reason: str) -> list[Decision]:
        member.gone = True
        return [do.Refuse(member, reason)]

    # The clock.

    def _tick(self, event: on.Tick) -> list[Decision]:
        decided: list[Decision] = []
        if self._now - self._said_waiting >= self.members.deadline_s / 4:
            decided += self._say_waiting()
        self.checkpoints.require_in_time(self.members, self._now)
        drops = checks.drops(self.state, self._now)
        for rank, granted_s in drops.items():
            what = checks.what_is_missing(self.state, {rank})
            self.members.dropped.append(rank)
            decided += self._lose(self.members.of(rank), f"{what} within {granted_s:.1f} s")
            if self.ended:
                return decided
        if drops:
            self.members.double_patience()
        return decided

    def _say_waiting(self) -> list[Decision]:
        self._said_waiting = self._now
        ready = {rank: self.members.of(rank) for rank in self._ranks.of(RankState.READY)}
        wanting = {rank: event.member for rank, event in self._epoch_losses.wanted.items()}
        waiting = ready | self._gathers.waiting | self._leaving | self.round.waiting | wanting
        return [do.SayWaiting(tuple(waiting.values()))] if waiting else []
