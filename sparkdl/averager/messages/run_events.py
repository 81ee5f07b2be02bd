"""What the driver is told of a run as it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.averager.messages.worker_state import WorkerState
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics, ShardStatistics
from sparkdl.phases import PhaseTimes


@dataclass(frozen=True, slots=True)
class NewRows:
    """What a worker has found in rows that arrive while it trains; it waits for ``Approved``.

    Attributes:
        rank: the worker's.
        shard: what is known of its rows by now.
    """

    rank: int
    shard: ShardStatistics


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
class EpochCounted:
    """Every worker has told what its metrics have counted; all wait for ``EpochMeasured``.

    Attributes:
        epoch: counted from 1.
        states: by rank; None of one that has sent nothing.
    """

    epoch: int
    states: tuple[WorkerState | None, ...]


@dataclass(frozen=True, slots=True)
class EpochValidated:
    """An epoch's losses are final, on held-out rows too if there are any.

    Where workers ask for leave they wait for ``EpochApproved``.
    """

    summary: EpochSummary


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """A worker tells where its time went since it told that last.

    Attributes:
        rank: the worker's.
        host: where it runs, as it calls it.
        times: by the driver's clock.
    """

    rank: int
    host: str
    times: PhaseTimes


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
class WorkersRestarted:
    """All workers are started again, from the last center.

    Attributes:
        why: in words.
        lost: the ranks that were lost before, as far as that is known.
    """

    why: str
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The checkpoint that was under way has been written."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing need have happened; whoever follows the run may look at the clock."""


RunEvent = (
    DataStatistics
    | NewRows
    | WindowReport
    | EpochSummary
    | RoundCommitted
    | EpochCounted
    | EpochValidated
    | WorkerTimes
    | WorkerLost
    | WorkersRestarted
    | CheckpointSaved
    | TimePassed
)
