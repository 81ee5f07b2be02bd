"""How a run was planned, where it went on from, and how it stands; and its checkpoints.

One checkpoint at a time is put together: the worker states arrive, then it is written while
training goes on. A round after which the next is due waits until it has been written.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from sparkdl.averager.coordination.actions import Recorder
from sparkdl.averager.coordination.committed import CommittedProgress, EpochLosses
from sparkdl.averager.coordination.membership import Membership, Tolerance
from sparkdl.averager.coordination.rank_states import Gathers, RankState, Shards, Window
from sparkdl.averager.coordination.round import Round
from sparkdl.averager.round_policy import All, RoundPolicy
from sparkdl.averager.run_events import Progress, WorkerState
from sparkdl.errors import DeadlineError, SparkDLError


class Schedule(Protocol):
    """Which commits become checkpoints."""

    def due(self, epoch: int) -> bool:
        """Whether the end of an epoch becomes a checkpoint."""

    def due_within(self, rounds: int) -> bool:
        """Whether it is time for one, this many rounds after the last."""


class Checkpointing:
    """The checkpoint being put together, and when the next is due.

    Args:
        run: how it stands.
        saved: whether a checkpoint holds what was committed before, if anything was.

    Attributes:
        awaited: ranks whose worker states have yet to arrive.
        told_to_end: why the run has to end once a commit has become a checkpoint.
    """

    def __init__(self, run: RunState, *, saved: bool = True) -> None:
        self.awaited: set[int] = set()
        self.told_to_end: SparkDLError | None = None
        self._schedule, self._committed = run.spec.checkpoints, run.committed
        self._members, self._deadline_s = run.members, run.spec.deadline_s
        self._since: float | None = None
        self._asked = False
        # The last round that a checkpoint was begun of, and the last that one exists of.
        self._begun_round = 0
        self._saved_round: int | None = 0 if saved else None

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being put together."""
        return self._since is not None

    @property
    def has_last_commit(self) -> bool:
        """Whether a checkpoint of the last commit exists, or none are written at all."""
        return self._schedule is None or self._saved_round == self._committed.round

    def preempt(self, reason: SparkDLError) -> None:
        """Make the next commit a checkpoint, after which the run ends."""
        self._asked = True
        self.told_to_end = reason

    def end_epoch(self, epoch: int) -> None:
        """Take note that a commit is the end of an epoch."""
        if self._schedule is not None and self._schedule.due(epoch):
            self._asked = True

    def holds(self, window: Window) -> bool:
        """Whether a window's round may become a checkpoint while another is being written."""
        if self._schedule is None or self._since is None:
            return False
        rounds = self._committed.round + 1 - self._begun_round
        ends = self.told_to_end is not None
        return ends or window.report.last or self._schedule.due_within(rounds)

    @property
    def due(self) -> bool:
        """Whether the latest commit becomes a checkpoint."""
        if self._schedule is None or self._since is not None:
            return False
        rounds = self._committed.round - self._begun_round
        return self._asked or self._schedule.due_within(rounds)

    def begin(self, awaited: Iterable[int]) -> None:
        """Begin a checkpoint of the latest commit, with the worker states of ``awaited``."""
        self._asked = False
        self._begun_round = self._committed.round
        self._since = self._members.now
        self.awaited = set(awaited)

    def forgo(self, rank: int) -> bool:
        """Take note that a rank's state has come, or never will; returns whether none is left."""
        if rank not in self.awaited:
            return False
        self.awaited.discard(rank)
        return not self.awaited

    def finish(self, *, saved: bool) -> SparkDLError | None:
        """Take note that writing has ended; returns why the run has to end now, if it does.

        Args:
            saved: whether the checkpoint exists. When the next is due does not depend on it.
        """
        self._since = None
        if saved:
            self._saved_round = self._begun_round
        return None if self._asked else self.told_to_end

    def restart_clock(self) -> None:
        """Restart the clock of how long the checkpoint takes."""
        self._since = None if self._since is None else self._members.now

    def require_in_time(self) -> None:
        """Check that the checkpoint is not taking longer than the deadline.

        Raises:
            DeadlineError: it has taken longer.
        """
        members, deadline_s = self._members, self._deadline_s
        if self._since is None or members.now - self._since <= deadline_s:
            return
        why = "Is the storage of checkpointPath slow or gone?"
        if self.awaited:
            why = f"It is still waiting for the worker state of {members.name(self.awaited)}"
        raise DeadlineError(
            f"the checkpoint of epoch {self._committed.epoch} was not written within "
            f"{deadline_s:g} s. {why}"
        )


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What is settled about a run before it begins.

    Attributes:
        world_size: number of workers.
        deadline_s: the longest for which a rank may be silent while it is waited for, and that
            writing a checkpoint may take, in seconds.
        tolerance: which losses of workers the run survives; none by default.
        policy: who is waited for in rounds; each run needs one of its own.
        checkpoints: which commits become checkpoints; none by default.
        frozen: the fingerprint that every worker's frozen parameters must have.
        followed: whether callbacks follow the run: the driver is also told of rounds, lost workers
            and checkpoints, and workers begin an epoch only once it has approved the previous one.
        measures: whether the driver computes metrics from what the workers count on held-out rows;
            such a run is ``followed``.
        metric: the metric that workers want to know for each epoch, instead of the loss.
    """

    world_size: int
    deadline_s: float = 600.0
    tolerance: Tolerance = field(default_factory=Tolerance)
    policy: RoundPolicy = field(default_factory=All)
    checkpoints: Schedule | None = None
    frozen: str = ""
    followed: bool = False
    measures: bool = False
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Where a run goes on; by default at its beginning.

    Attributes:
        progress: how far the training has come already.
        saved: whether a checkpoint holds that progress, if there is any.
        kept: what was kept of each rank at its last commit.
        validated: whether the loss of the last epoch that has ended is known.
    """

    progress: Progress | None = None
    saved: bool = True
    kept: Mapping[int, WorkerState] = field(default_factory=dict)
    validated: bool = False

    def resized(self, world_size: int) -> Restart:
        """The same for another number of workers, each with a copy of what one rank kept."""
        assert self.progress is not None
        kept = [self.kept[rank].copies(world_size) for rank in sorted(self.kept)[:1]]
        return replace(
            self,
            progress=self.progress.resized(world_size),
            kept=dict(enumerate(kept[0])) if kept else {},
        )


class RunState:
    """How a run stands.

    Args:
        spec: how it was planned.
        now: the time, in seconds, by the same clock as that of events.
        restart: where it goes on; by default it is just starting.

    Attributes:
        spec: how it was planned.
        do: what is called to have something done outside.
        members: who is in the run.
        shards: what the workers found in their rows.
        gathers: what they exchange in gathers.
        round: who takes part in the round under way.
        ranks: where each rank's worker stands.
        committed: how far the training has come.
        checkpoints: the checkpoint being put together, and when the next is due.
        epoch_losses: who waits for epochs' losses.
        started: whether the driver has let the workers train.
    """

    def __init__(self, spec: RunSpec, now: float, restart: Restart | None = None) -> None:
        restart = restart or Restart()
        self.spec = spec
        self.do = Recorder()
        self.members = Membership(spec, now)
        self.shards = Shards(spec.world_size)
        self.gathers = Gathers(self)
        progress = restart.progress or Progress.start(spec.world_size)
        self.committed = CommittedProgress(progress, restart.kept, now, restart.validated)
        spec.policy.begin(self.committed.positions)
        self.round = Round(self.members.everyone, spec.policy)
        self.ranks = self.round.ranks
        self.checkpoints = Checkpointing(self, saved=restart.saved)
        self.epoch_losses = EpochLosses(self)
        self.started = False

    @property
    def to_let_in(self) -> list[int]:
        """The ranks to be let in as soon as no sum is under way."""
        return sorted(self.ranks.of(RankState.READY)) if self.started else []

    @property
    def left(self) -> KeysView[int]:
        """The ranks that have trained their last epoch; nobody waits for them."""
        return self.ranks.of(RankState.FINISHED)
