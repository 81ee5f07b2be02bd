"""What the driver is told about a run in progress."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.averager.messages.worker_state import WorkerState
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics import DataStatistics, ShardStatistics
from sparkdl.phases import PhaseTimes


@dataclass(frozen=True, slots=True)
class NewRows:
    """What a worker has found in rows that arrive while it trains; it waits for ``Approved``.

    Attributes:
        rank: the worker's.
        shard: what is known about its rows by now.
    """

    rank: int
    shard: ShardStatistics


@dataclass(frozen=True, slots=True)
class RoundCommitted:
    """A round has become the center.

    Attributes:
        round: counted from 1 in this run.
        reports: what each contributor trained on.
    """

    round: int
    reports: tuple[WindowReport, ...]


@dataclass(frozen=True, slots=True)
class EpochCounted:
    """Every worker has sent what its metrics have counted; all wait for ``EpochMeasured``.

    Attributes:
        epoch: counted from 1.
        states: by rank; None for a rank that has sent nothing.
    """

    epoch: int
    states: tuple[WorkerState | None, ...]


@dataclass(frozen=True, slots=True)
class EpochValidated:
    """An epoch's losses are final, on held-out rows too if there are any.

    Where workers ask for permission, they wait for ``EpochApproved``.
    """

    summary: EpochSummary


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """A worker reports where its time went since its last report.

    Attributes:
        rank: the worker's.
        host: the name that it gives for its host.
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
        why: the reason in words; follows its name.
    """

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class WorkersRestarted:
    """All workers are restarted from the last center.

    Attributes:
        why: the reason in words.
        lost: the ranks that were lost before, as far as known.
    """

    why: str
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The pending checkpoint has been written."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing need have happened; whatever follows the run may check the clock."""


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
