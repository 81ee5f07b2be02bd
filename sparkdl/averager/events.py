"""What the decisions of a run are told, and what they answer: values that cross the border.

The loop at the edge turns bytes into the first half and the second half into bytes
(``loop.py``); the simulation does the same with neither sockets nor a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.averager.center_update import Contributions
from sparkdl.averager.kept import KeptState
from sparkdl.averager.progress import Progress
from sparkdl.errors import SparkDLError
from sparkdl.events import EpochSummary, ValidationReport, WindowReport
from sparkdl.feed.facts import DataFacts, ShardFacts


@dataclass(eq=False, slots=True)
class Member:
    """One worker's connection, from joining to leaving.

    Attributes:
        rank: the worker's rank.
        host: where it runs.
        attempt: of Spark's task; a later one takes the place of an earlier.
        task: the number of its task, which several workers may share.
        frozen: the fingerprint of its frozen parameters; empty if it has none.
        gone: whether it was lost, dropped or replaced; decisions ignore what it says from then on.
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


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker has connected, for the first time or again."""

    member: Member


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker's connection broke; ``why`` follows its name in messages."""

    member: Member
    why: str


@dataclass(frozen=True, slots=True)
class RowsFound:
    """A worker says what it has found in its rows, or in those that have arrived.

    Attributes:
        member: the worker.
        shard: what it has found.
        row_server: where others fetch rows from it, which is theirs to read; None if they do not.
    """

    member: Member
    shard: ShardFacts
    row_server: object = None


@dataclass(frozen=True, slots=True)
class Gave:
    """A worker has given what the others are to know, and waits for what they give."""

    member: Member
    value: object


@dataclass(frozen=True, slots=True)
class WindowClosed:
    """A worker is about to contribute.

    Attributes:
        member: the worker.
        report: what it has trained on.
        kept: what is to be kept of it, should all start again from this round; None for nothing.
        takes_reply: whether it wants to know what came out.
    """

    member: Member
    report: WindowReport
    kept: KeptState | None = None
    takes_reply: bool = True


@dataclass(frozen=True, slots=True)
class Contributed:
    """A worker's contribution has been added to the sum."""

    member: Member


@dataclass(frozen=True, slots=True)
class Taken:
    """A worker has been sent the center, or what the round came to."""

    member: Member


@dataclass(frozen=True, slots=True)
class OwnStateWritten:
    """A worker's own state is in the checkpoint that waited for it."""

    member: Member


@dataclass(frozen=True, slots=True)
class Validated:
    """A worker reports the loss on its held-out rows."""

    member: Member
    report: ValidationReport


@dataclass(frozen=True, slots=True)
class EpochLossesWanted:
    """A worker waits for what epochs came to.

    Attributes:
        member: the worker.
        known: of how many epochs it knows that.
        epochs: of how many it wants to.
    """

    member: Member
    known: int
    epochs: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has trained its last epoch."""

    member: Member


# What happened elsewhere.


@dataclass(frozen=True, slots=True)
class Failed:
    """The run cannot go on; later failures are consequences of the first and are dropped."""

    error: SparkDLError


@dataclass(frozen=True, slots=True)
class Started:
    """The driver has looked at the facts about the rows: the workers may train."""


@dataclass(frozen=True, slots=True)
class Approved:
    """The driver has looked at rows that arrived while a rank trains."""

    rank: int


@dataclass(frozen=True, slots=True)
class EpochApproved:
    """The driver has looked at an epoch: workers that ask for leave may begin the next one."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StopWanted:
    """The training is to end here, as if it had come to its end.

    Attributes:
        reason: why, for logs.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """The run is to end with ``reason`` once a commit has become a checkpoint."""

    reason: SparkDLError


@dataclass(frozen=True, slots=True)
class WorkersExpected:
    """What workers wait for before they can start makes progress."""


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """The checkpoint that was being written is there, or was given up."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; everything that had arrived before has been told."""


Event = (
    Joined
    | Lost
    | RowsFound
    | Gave
    | WindowClosed
    | Contributed
    | Taken
    | OwnStateWritten
    | Validated
    | EpochLossesWanted
    | Finished
    | Failed
    | Started
    | Approved
    | EpochApproved
    | StopWanted
    | Preempted
    | WorkersExpected
    | CheckpointWritten
    | Tick
)


# What is to be done at a worker's connection.


@dataclass(frozen=True, slots=True)
class ReadOn:
    """Tell a worker, which has found something in its first rows, to read all of them."""

    member: Member


@dataclass(frozen=True, slots=True)
class Welcome:
    """Send a worker its position and the center; ``Taken`` has to follow."""

    member: Member


@dataclass(frozen=True, slots=True)
class GoOn:
    """Tell a worker that the rows it has shown can be trained on."""

    member: Member


@dataclass(frozen=True, slots=True)
class Tell:
    """Send workers what all have given, by rank."""

    members: tuple[Member, ...]
    gathered: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class TellEpochLosses:
    """Send a worker what the epochs that it does not know of came to."""

    member: Member
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """Add a worker's contribution to the sum; ``Contributed`` has to follow.

    Attributes:
        member: the worker.
        weight: rows behind it.
        staleness: how often the center was updated since the worker has received it.
    """

    member: Member
    weight: int
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class StartOver:
    """Forget the sum; tell workers, also those that still send, to contribute the same again."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a worker what its round came to; ``Taken`` has to follow.

    Attributes:
        member: the worker.
        final: whether it is sent the epoch's final center in place of the round's outcome.
        values: whether it wants them; it is told that they are committed otherwise.
        own_state: whether its own state belongs to a checkpoint of this commit: it is asked for,
            and ``OwnStateWritten`` has to follow.
    """

    member: Member
    final: bool
    values: bool
    own_state: bool


@dataclass(frozen=True, slots=True)
class AskOwnState:
    """Have a worker that waits for an epoch's end send its own state for a checkpoint now."""

    member: Member


@dataclass(frozen=True, slots=True)
class SayWaiting:
    """Tell workers that wait for others that the run goes on."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """End a worker's connection."""

    member: Member


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell a worker why it cannot take part, and end its connection."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End the connection of a worker that has finished."""

    member: Member


# What is to be done with the center.


@dataclass(frozen=True, slots=True)
class OpenSum:
    """Begin a round's sum, in the order of ``ranks``."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Skip:
    """A rank contributes nothing to the sum."""

    rank: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Have the sum change the center.

    Attributes:
        contributions: what the sum is of; the center stays as it is without any.
    """

    contributions: Contributions


@dataclass(frozen=True, slots=True)
class BeginCheckpoint:
    """Copy the center, which is about to change, for a checkpoint of what has been committed.

    Attributes:
        progress: how far the training has come.
        data: the facts about the rows.
    """

    progress: Progress
    data: DataFacts


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Every own state is there: write the rest. ``CheckpointWritten`` has to follow."""


# What is to be done in the driver.


@dataclass(frozen=True, slots=True)
class NewRows:
    """What a worker has found in rows that arrive while it trains; it waits for ``Approved``.

    Attributes:
        rank: the worker's.
        shard: what is known of its rows by now.
    """

    rank: int
    shard: ShardFacts


@dataclass(frozen=True, slots=True)
class RoundCommitted:
    """A round has become the center.

    Attributes:
        round: counted from 1 in this run.
        reports: what each contributor had trained on.
    """

    round: int
    reports: tuple[WindowReport, ...]


@dataclass(frozen=True, slots=True)
class EpochValidated:
    """What an epoch came to is known for good, on held-out rows too if there are any.

    Where workers ask for leave they wait for ``EpochApproved``.
    """

    summary: EpochSummary


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker was lost, and the run goes on.

    Attributes:
        rank: the worker's.
        why: in words; follows its name.
    """

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The checkpoint that was under way has been written, or was given up with a warning."""


RunEvent = (
    DataFacts
    | NewRows
    | WindowReport
    | EpochSummary
    | RoundCommitted
    | EpochValidated
    | WorkerLost
    | CheckpointSaved
)


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the driver."""

    event: RunEvent


@dataclass(frozen=True, slots=True)
class End:
    """The run is over.

    Attributes:
        failure: why it failed; every worker is told. None if all have finished.
        stopped: why it was stopped, if it was; every worker is told.
    """

    failure: SparkDLError | None
    stopped: str | None = None


Decision = (
    ReadOn
    | Welcome
    | GoOn
    | Tell
    | TellEpochLosses
    | Receive
    | StartOver
    | Reply
    | AskOwnState
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
