"""A run without threads, sockets or a clock, and what policies come to in many schedules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from decided import Kind, Told, do, told
from support.simulation.plan import random_plan
from support.simulation.run import Outcome, simulate

from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Member, Tolerance
from sparkdl.averager.coordination.run_state import Restart, RunSpec, Schedule
from sparkdl.averager.round_policy import All, RoundPolicy
from sparkdl.averager.run_events import Progress
from sparkdl.averager.values.center_update import Contributions
from sparkdl.errors import SparkDLError
from sparkdl.events import WindowReport
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.shards import ShardStatistics


def shard(rows: int = 1, *, columns: int = 1, **found: Any) -> ShardStatistics:
    """A worker's rows."""
    return ShardStatistics(rows, (ColumnStatistics(**found),) * columns)


def report(
    rank: int, *, examples: int = 1, last: bool = False, epoch: int = 1, step: int = 1
) -> WindowReport:
    """What a worker has trained on."""
    return WindowReport(
        rank=rank, epoch=epoch, step=step, examples=examples, loss_sum=0.0, last=last
    )


def only(kind: Kind, decisions: list[Told]) -> list[Told]:
    """The decisions of one kind."""
    return [decision for decision in decisions if isinstance(decision, kind)]


def commit(run: Run, *weights: int, staleness: int = 0, share: float = 1.0) -> Told:
    """The decision to commit what ranks with so many rows have contributed."""
    decision: Told = do.commit(Contributions(weights, len(run.ranks), staleness, share=share))
    return decision


class Every:
    """A checkpoint every so many rounds, or with every epoch's end."""

    def __init__(self, rounds: int | None = None, *, epochs: bool = False) -> None:
        self._rounds = rounds
        self._epochs = epochs

    def due(self, epoch: int) -> bool:
        """As all epochs or none are."""
        return self._epochs

    def due_within(self, rounds: int) -> bool:
        """As soon as there are enough."""
        return self._rounds is not None and rounds >= self._rounds


class Run:
    """A coordinator, who has joined, and what time it is."""

    def __init__(
        self,
        world_size: int,
        *,
        deadline_s: float = 60.0,
        max_failures: int = 0,
        min_workers: int = 1,
        checkpoints: Schedule | None = None,
        saved: bool = True,
        progress: Progress | None = None,
        kept: Mapping[int, bytes] | None = None,
        frozen: str = "",
        policy: RoundPolicy | None = None,
    ) -> None:
        self.now = 1000.0
        self.members: dict[int, Member] = {}
        spec = RunSpec(
            world_size=world_size,
            deadline_s=deadline_s,
            tolerance=Tolerance(max_failures, min_workers),
            checkpoints=checkpoints,
            frozen=frozen,
            policy=policy or All(),
        )
        restart = Restart(progress=progress, saved=saved, kept=kept or {})
        self.coordinator = Coordinator(spec, self.now, restart)
        self.ranks = range(world_size)

    @property
    def failure(self) -> SparkDLError | None:
        return self.coordinator.failure

    def tell(self, event: str, *arguments: Any, **options: Any) -> list[Told]:
        """Everything happens now, until somebody waits."""
        return told(getattr(self.coordinator, event)(self.now, *arguments, **options))

    def wait(self, seconds: float) -> list[Told]:
        """Let time pass, and look at the clock as often as the loop does."""
        tick_s, until = self.coordinator.members.tick_s, self.now + seconds
        decisions: list[Told] = []
        while self.now + tick_s <= until + 1e-9:
            self.now += tick_s
            decisions += self.tell("tick")
        self.now = until
        return decisions

    def join(
        self, rank: int, attempt: int = 0, host: str | None = None, task: int = -1, frozen: str = ""
    ) -> list[Told]:
        self.members[rank] = Member(rank, host or f"host-{rank}", attempt, task, frozen)
        return self.tell("joined", self.members[rank])

    def read(
        self, rank: int, found: ShardStatistics | None = None, row_server: object = None
    ) -> list[Told]:
        return self.tell("rows_found", self.members[rank], found or shard(), row_server)

    def start(self) -> list[Told]:
        """What the driver does once it has looked at the rows."""
        return self.tell("start")

    def take(self, *ranks: int) -> list[Told]:
        """Workers have taken the center or a reply; without any, all of them have."""
        decisions: list[Told] = []
        for rank in ranks or self.members:
            decisions += self.tell("taken", self.members[rank])
        return decisions

    def close(self, rank: int, *, takes_reply: bool = True, **window: Any) -> list[Told]:
        """A worker is about to contribute."""
        member, closed = self.members[rank], report(rank, **window)
        return self.tell("window_closed", member, closed, takes_reply=takes_reply)

    def add(self, rank: int) -> list[Told]:
        """A worker's contribution is in the sum."""
        return self.tell("contributed", self.members[rank])

    def contribute(self, rank: int, **window: Any) -> list[Told]:
        return self.close(rank, **window) + self.add(rank)

    def round(self, *ranks: int, **window: Any) -> list[Told]:
        """Contributions of all, and everybody takes what came out."""
        decisions: list[Told] = []
        for rank in ranks or self.ranks:
            decisions += self.contribute(rank, **window)
        self.take()
        return decisions

    def finish(self, rank: int) -> list[Told]:
        return self.tell("finished", self.members[rank])

    def lose(self, rank: int) -> list[Told]:
        return self.tell("lost", self.members[rank], "was killed")

    def come_back(self, rank: int, attempt: int = 1, row_server: object = None) -> list[Told]:
        """Join again and read the rows; the decisions are those of the latter."""
        self.join(rank, attempt, "elsewhere")
        return self.read(rank, row_server=row_server)

    def positions(self) -> list[int]:
        """Steps that are committed, by rank."""
        return [position.step for position in self.coordinator.committed.positions]


def started(world_size: int, **options: Any) -> Run:
    """A run that everybody has been let start, and has the center of."""
    run = Run(world_size, **options)
    for rank in run.ranks:
        run.join(rank)
    for rank in run.ranks:
        run.read(rank)
    run.start()
    run.take()
    return run


def expect_failure(run: Run, decisions: list[Told], kind: type[SparkDLError], words: str) -> None:
    """The run has ended, with an error that says these words."""
    assert decisions[-1:] == [do.end(run.failure)]
    with pytest.raises(kind, match=words):
        raise run.failure or AssertionError("the run goes on")


class AllButStragglers(All):
    """Backup workers (Chen et al. 2016): a round does without its slowest.

    Args:
        spared: how many are not waited for.
    """

    in_step = False

    def __init__(self, spared: int = 1) -> None:
        self._spared = spared

    def is_enough(self, entered: int, late: int, group: int) -> bool:
        return entered >= group - self._spared


def outcomes(
    policy: Callable[[], RoundPolicy],
    seeds: Iterable[int],
    times: int = 1,
    kind: type[Coordinator] = Coordinator,
) -> list[Outcome]:
    """How simulated runs end whose epochs have so many times as many windows as usual."""
    return [simulate(random_plan(seed, times=times), kind, policy=policy) for seed in seeds]


class Calls:
    """Counts the calls of functions while it is entered."""

    counted = 0

    def __enter__(self) -> None:
        sys.setprofile(self._count)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.counted += event in ("call", "c_call")
