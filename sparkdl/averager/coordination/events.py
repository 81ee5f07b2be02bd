"""The input to the decisions of a run: values that cross the border from outside.

The loop at the edge turns bytes into these (``service/loop.py``). The output is in ``decisions``.
Nobody changes either; they are not frozen because it takes four times as long to make one that is,
and each contribution makes half a dozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdl.averager.messages.progress import WorkerState
from sparkdl.errors import SparkDLError
from sparkdl.events import MetricValue, ValidationReport, WindowReport
from sparkdl.feed.statistics.shards import ShardStatistics


@dataclass(eq=False, slots=True)
class Member:
    """One worker's connection, from joining to leaving.

    Attributes:
        rank: the worker's rank.
        host: the host that it runs on.
        attempt: its Spark task's attempt; a later one replaces an earlier one.
        task: its task's number, which several workers may share.
        frozen: the fingerprint of its frozen parameters; empty if it has none.
        gone: whether it was lost, dropped or replaced; what it says from then on is ignored.
    """

    rank: int
    host: str
    attempt: int = 0
    task: int = -1
    frozen: str = ""
    gone: bool = False

    def __post_init__(self) -> None:
        if self.task < 0:
            self.task = self.rank

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


# What happened at a worker's connection.


@dataclass(slots=True)
class Joined:
    """A worker has connected, for the first time or again."""

    member: Member


@dataclass(slots=True)
class Lost:
    """A worker's connection broke; ``why`` follows its name in messages."""

    member: Member
    why: str


@dataclass(slots=True)
class RowsFound:
    """A worker reports what it found in its rows.

    Attributes:
        member: the worker.
        shard: what it found.
        row_server: where others fetch its rows, for them to interpret; None if they do not.
    """

    member: Member
    shard: ShardStatistics
    row_server: object = None


@dataclass(slots=True)
class Gave:
    """A worker has given its part of a gather, and waits for the others' parts."""

    member: Member
    value: object


@dataclass(slots=True)
class WindowClosed:
    """A worker is about to contribute.

    Attributes:
        member: the worker.
        report: what it has trained on.
        kept: what to keep of it in case all restart from this round; None for nothing.
        takes_reply: whether it wants the result.
    """

    member: Member
    report: WindowReport
    kept: WorkerState | None = None
    takes_reply: bool = True


@dataclass(slots=True)
class Contributed:
    """A worker's contribution has been added to the sum."""

    member: Member


@dataclass(slots=True)
class Taken:
    """A worker has been sent the center, or the round's result."""

    member: Member


@dataclass(slots=True)
class WorkerStateWritten:
    """A worker's state is in the checkpoint that waited for it."""

    member: Member


@dataclass(slots=True)
class Validated:
    """A worker reports the loss on its held-out rows.

    Attributes:
        member: the worker.
        report: the loss.
        states: what its metrics counted; None without metrics.
    """

    member: Member
    report: ValidationReport
    states: WorkerState | None = None


@dataclass(slots=True)
class EpochLossesWanted:
    """A worker waits for epochs' losses.

    Attributes:
        member: the worker.
        known: for how many epochs it knows the loss.
        epochs: for how many it wants to know it.
    """

    member: Member
    known: int
    epochs: int


@dataclass(slots=True)
class Finished:
    """A worker has trained its last epoch."""

    member: Member


# What happened elsewhere.


@dataclass(slots=True)
class Failed:
    """The run cannot go on; later failures are consequences of the first and are dropped."""

    error: SparkDLError


@dataclass(slots=True)
class Started:
    """The driver has approved the rows' statistics: the workers may train.

    Attributes:
        loss_use: how they use the loss, for them to interpret.
    """

    loss_use: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class EpochApproved:
    """The driver has approved an epoch: workers that ask for leave may begin the next one."""

    epoch: int


@dataclass(slots=True)
class EpochMeasured:
    """The driver has computed an epoch's metrics; the answer to ``run_events.EpochCounted``.

    Attributes:
        epoch: counted from 1.
        values: the metrics' values, by name.
    """

    epoch: int
    values: Mapping[str, MetricValue]


@dataclass(slots=True)
class StopWanted:
    """The training has to end here, as if it had reached its end.

    Attributes:
        reason: why, for logs.
    """

    reason: str


@dataclass(slots=True)
class CommitWanted:
    """Workers that exchange among themselves have to commit at their next gather."""


@dataclass(slots=True)
class Preempted:
    """The run has to end with ``reason`` once a commit has become a checkpoint."""

    reason: SparkDLError


@dataclass(slots=True)
class WorkersExpected:
    """What workers wait for before they can start is making progress."""


@dataclass(slots=True)
class CheckpointWritten:
    """The checkpoint that was being written now exists."""


@dataclass(slots=True)
class CheckpointGivenUp:
    """The checkpoint that was being written failed, and nothing of it is left."""


@dataclass(slots=True)
class Tick:
    """Time has passed; everything that arrived before has been reported."""


Event = (
    Joined
    | Lost
    | RowsFound
    | Gave
    | WindowClosed
    | Contributed
    | Taken
    | WorkerStateWritten
    | Validated
    | EpochLossesWanted
    | Finished
    | Failed
    | Started
    | EpochApproved
    | EpochMeasured
    | StopWanted
    | CommitWanted
    | Preempted
    | WorkersExpected
    | CheckpointWritten
    | CheckpointGivenUp
    | Tick
)
