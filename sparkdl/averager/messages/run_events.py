"""What the driver is told about a run as it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.averager.messages.progress import WorkerState
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.phases import PhaseTimes


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
    """Every worker has reported what its metrics counted; all wait for ``EpochMeasured``.

    Attributes:
        epoch: counted from 1.
        states: by rank; None for a rank that sent nothing.
    """

    epoch: int
    states: tuple[WorkerState | None, ...]


@dataclass(frozen=True, slots=True)
class EpochValidated:
    """An epoch's losses are final, including those on held-out rows if there are any.

    Workers that ask for leave wait for ``EpochApproved``.
    """

    summary: EpochSummary


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """A worker reports where its time went since its last such report.

    Attributes:
        rank: the worker's rank.
        host: its host, as it names it.
        times: its times, by the driver's clock.
    """

    rank: int
    host: str
    times: PhaseTimes


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker was lost, and the run goes on.

    Attributes:
        rank: the worker's rank.
        why: the reason in words; follows its name.
    """

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class WorkersRestarted:
    """All workers are restarted from the last center.

    Attributes:
        why: the reason in words.
        lost: the ranks that were lost before, as far as they are known.
    """

    why: str
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The checkpoint that was under way has been written."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing need have happened; lets whoever follows the run check the clock."""


RunEvent = (
    DataStatistics
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
