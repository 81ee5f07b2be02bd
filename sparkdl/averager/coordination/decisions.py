"""What the decisions of a run say: values that cross the border to the outside.

The loop at the edge turns them into bytes (``service/loop.py``). The input to the decisions is in
``events``, which also says why none is frozen; what the driver is told is in ``run_events``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkdl.averager.coordination.events import Member
from sparkdl.averager.messages.progress import Progress
from sparkdl.averager.messages.run_events import RunEvent
from sparkdl.averager.values.center_update import Contributions
from sparkdl.errors import SparkDLError
from sparkdl.feed.statistics.shards import DataStatistics

# What is to be done at a worker's connection.


@dataclass(slots=True)
class Welcome:
    """Send a worker its position and the center; ``Taken`` has to follow."""

    member: Member


@dataclass(slots=True)
class Tell:
    """Send workers what all gave, by rank.

    Attributes:
        members: the workers.
        gathered: what they gave.
        commit: whether to ask them for a commit, if they can make one at this step.
    """

    members: tuple[Member, ...]
    gathered: tuple[object, ...]
    commit: bool = False


@dataclass(slots=True)
class TellEpochLosses:
    """Send a worker the losses of epochs that it does not know yet."""

    member: Member
    losses: tuple[float, ...]


@dataclass(slots=True)
class Receive:
    """Add a worker's contribution to the sum; ``Contributed`` has to follow.

    Attributes:
        member: the worker.
        weight: how much the contribution counts, in rows as a rule.
        staleness: how often the center has been updated since the worker received it.
    """

    member: Member
    weight: float
    staleness: int = 0


@dataclass(slots=True)
class StartOver:
    """Forget the sum; tell workers, even those still sending, to contribute the same again."""

    members: tuple[Member, ...]


@dataclass(slots=True)
class Reply:
    """Send a worker the result of its round; ``Taken`` has to follow.

    Attributes:
        member: the worker.
        final: whether to send it the epoch's final center in place of the round's result.
        values: whether it wants the values; otherwise it is only told of the commit.
        worker_state: whether to ask for its state for a checkpoint of this commit;
            ``WorkerStateWritten`` then has to follow.
    """

    member: Member
    final: bool
    values: bool
    worker_state: bool


@dataclass(slots=True)
class AskWorkerState:
    """Have a worker that is waiting for an epoch's end send its state for a checkpoint now."""

    member: Member


@dataclass(slots=True)
class SayWaiting:
    """Tell workers waiting for others that the run goes on."""

    members: tuple[Member, ...]


@dataclass(slots=True)
class Drop:
    """End a worker's connection; ``why`` follows its name in messages."""

    member: Member
    why: str = field(default="", compare=False)


@dataclass(slots=True)
class Refuse:
    """Tell a worker why it cannot take part, and end its connection."""

    member: Member
    reason: str


@dataclass(slots=True)
class Dismiss:
    """End the connection of a worker that has finished."""

    member: Member


# What is to be done with the center.


@dataclass(slots=True)
class OpenSum:
    """Begin a round's sum, in the order of ``ranks``."""

    ranks: tuple[int, ...]


@dataclass(slots=True)
class Skip:
    """A rank contributes nothing to the sum."""

    rank: int


@dataclass(slots=True)
class Commit:
    """Let the sum change the center.

    Attributes:
        contributions: what the sum consists of; without any, the center is unchanged.
    """

    contributions: Contributions


@dataclass(slots=True)
class BeginCheckpoint:
    """Copy the center, which is about to change, for a checkpoint of what has been committed.

    Attributes:
        progress: how far the training has come.
        data: the statistics of the rows.
    """

    progress: Progress
    data: DataStatistics


@dataclass(slots=True)
class WriteCheckpoint:
    """Write the rest of the checkpoint, now that every worker's state is in.

    ``CheckpointWritten`` or ``CheckpointGivenUp`` has to follow.
    """


# What is to be done in the driver.


@dataclass(slots=True)
class Report:
    """Tell the driver."""

    event: RunEvent


@dataclass(slots=True)
class End:
    """The run is over.

    Attributes:
        failure: why it failed, which every worker is told; None if all have finished.
        stopped: why it was stopped, if it was, which every worker is told.
    """

    failure: SparkDLError | None
    stopped: str | None = None


Decision = (
    Welcome
    | Tell
    | TellEpochLosses
    | Receive
    | StartOver
    | Reply
    | AskWorkerState
    | SayWaiting
    | Drop
    | Refuse
    | Dismiss
    | OpenSum
    | Skip
    | Commit
    | BeginCheckpoint
    | WriteCheckpoint
    | Report
    | End
)
