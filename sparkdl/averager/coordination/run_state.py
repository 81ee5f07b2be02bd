"""What is known of a run: how it was planned, where it went on from, and how it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkdl.averager.coordination.checkpointing import Checkpointing, Schedule
from sparkdl.averager.coordination.committed import CommittedProgress, EpochLosses
from sparkdl.averager.coordination.events import Member
from sparkdl.averager.coordination.membership import Membership, Tolerance
from sparkdl.averager.coordination.rank_states import RankState
from sparkdl.averager.coordination.reports import Gathers, Shards
from sparkdl.averager.coordination.round import Round
from sparkdl.averager.messages.progress import Progress
from sparkdl.averager.messages.worker_state import WorkerState
from sparkdl.averager.policies.round_policy import All, RoundPolicy


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
        resumed: whether the training resumes from a checkpoint, which may belong to other rows.
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
    resumed: bool = False
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
    """

    progress: Progress | None = None
    saved: bool = True
    kept: Mapping[int, WorkerState] = field(default_factory=dict)


class RunState:
    """How a run stands.

    Attributes:
        spec: how it was planned.
        members: who is in the run.
        shards: what the workers found in their rows.
        gathers: what they exchange in gathers.
        round: who takes part in the round under way.
        ranks: where each rank's worker stands.
        committed: how far the training has come.
        checkpoints: the checkpoint being put together, and when the next is due.
        epoch_losses: who waits for epochs' losses.
        started: whether the driver has let the workers train.
        shown: the workers that wait for the driver to check rows, by rank.
    """

    def __init__(self, spec: RunSpec, now: float, restart: Restart) -> None:
        self.spec = spec
        self.members = Membership(spec.world_size, spec.deadline_s, spec.tolerance, now)
        self.shards = Shards(spec.world_size)
        self.gathers = Gathers(spec.world_size)
        progress = restart.progress or Progress.start(spec.world_size)
        self.committed = CommittedProgress(progress, restart.kept, now)
        spec.policy.begin(self.committed.positions)
        self.round = Round(self.members.everyone, spec.policy)
        self.ranks = self.round.ranks
        self.checkpoints = Checkpointing(spec.checkpoints, self.committed, saved=restart.saved)
        self.epoch_losses = EpochLosses(
            self.committed,
            self.shards,
            followed=spec.followed,
            measures=spec.measures,
            metric=spec.metric,
        )
        self.started = False
        self.shown: dict[int, Member] = {}

    @property
    def to_let_in(self) -> list[int]:
        """The ranks to be let in as soon as no sum is under way."""
        return sorted(self.ranks.of(RankState.READY)) if self.started else []

    @property
    def finished(self) -> set[int]:
        """The ranks that have trained their last epoch; nobody waits for them."""
        return set(self.ranks.of(RankState.FINISHED))
