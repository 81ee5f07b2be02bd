"""What the driver is told about a run as it goes on.

How far a training has come, and what the driver keeps of each worker at that point.

Progress is counted at commits, as checkpoints say it and workers are told it: a row counts as
trained on once the round that it contributed to is committed, not before.
"""

from __future__ import annotations

import dataclasses
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import TrainingError
from sparkdl.events import EpochSummary, WindowReport, WindowSums
from sparkdl.feed.shards import DataStatistics
from sparkdl.phases import PhaseTimes
from sparkdl.untrusted import read


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a worker continues: the first minibatch that no committed round contains."""

    epoch: int = 1
    """Epoch counted from 1."""
    step: int = 0
    """Optimizer steps since the start of training."""
    step_of_epoch: int = 0
    """Optimizer steps since the start of the epoch."""

    @classmethod
    def after(cls, report: WindowReport) -> Position:
        """The position after a committed window."""
        return cls(epoch=report.epoch, step=report.step, step_of_epoch=report.step_of_epoch)

    def next_epoch(self) -> Position:
        """The start of the following epoch."""
        return Position(epoch=self.epoch + 1, step=self.step)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far all workers have come together."""

    epoch: int
    """The epoch under way, counted from 1."""
    rounds: int
    """Rounds committed in that epoch."""
    positions: tuple[Position, ...]
    """The workers' positions, by rank."""
    sums: tuple[WindowSums, ...] = ()
    """What the windows committed in that epoch add up to, of the ranks that have any."""
    history: tuple[EpochSummary, ...] = ()
    """The previous epochs."""
    since: Position = Position()
    """Where these workers began: at the start of the epoch before which their number changed."""
    seconds: float = dataclasses.field(default=0.0, compare=False)
    """How long the epoch under way had taken when its last round was committed."""

    @classmethod
    def start(cls, world_size: int) -> Progress:
        """The progress at the start: none."""
        return cls(epoch=1, rounds=0, positions=(Position(),) * world_size)

    def resized(self, world_size: int) -> Progress:
        """The same for another number of workers, who begin an epoch together.

        They go on counting from the steps of the worker that has taken the most.

        Args:
            world_size: number of workers.

        Raises:
            ValueError: part of the epoch under way has been committed.
        """
        if self.rounds:
            raise ValueError(f"{self.rounds} rounds of epoch {self.epoch} have been committed")
        step = max(position.step for position in self.positions)
        start = Position(epoch=self.epoch, step=step)
        return dataclasses.replace(self, positions=(start,) * world_size, since=start)

    @property
    def all_rounds(self) -> int:
        """Rounds committed in the training."""
        return self.rounds + sum(summary.rounds for summary in self.history)

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON, for ``from_json``; what epochs have by name is not copied."""
        # Every checkpoint has the whole history, whose copies took four fifths of its time.
        names = [each.name for each in dataclasses.fields(EpochSummary)]
        history = [{name: getattr(each, name) for name in names} for each in self.history]
        return {**dataclasses.asdict(dataclasses.replace(self, history=())), "history": history}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Progress:
        """Restore what ``as_json`` returned, possibly read from a file.

        Raises:
            TypeError: it is something else.
        """
        progress: Progress = read(cls, fields)
        if any(each.rank >= len(progress.positions) for each in progress.sums):
            raise TypeError(f"sums is {progress.sums!r}")
        if progress.since.epoch > progress.epoch or progress.since.step_of_epoch:
            raise TypeError(f"since is {progress.since!r}")
        return progress


IN_MEMORY_BYTES = 1 << 20
"""Anything larger goes to a file, because the driver's memory must not grow with the workers: the
state of an 8-bit optimizer does, random numbers and counters do not."""


class WorkerState:
    """Some bytes from a worker; used by one thread at a time.

    Attributes:
        size: how many bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        # Open as long as this object lives; the file has no name, so nothing is left behind.
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def add(self, block: bytes | memoryview) -> None:
        """Keep more bytes.

        Raises:
            TrainingError: they fit neither into the driver's memory nor on its disk.
        """
        try:
            self._file.write(block)
        except OSError as error:
            raise TrainingError(
                f"the driver could not store the state for restarting a worker ({self.size} bytes "
                f"or more) in {tempfile.gettempdir()}: {error}. Set TMPDIR to a folder with more "
                "space"
            ) from error
        self.size += len(block)

    def blocks(self, size: int) -> Iterator[bytes]:
        """The bytes, from first to last.

        Args:
            size: how many at a time.
        """
        self._file.seek(0)
        while block := self._file.read(size):
            yield block

    def copies(self, number: int) -> list[WorkerState]:
        """As many copies, for a thread each."""
        copies = [WorkerState() for _ in range(number)]
        for block in self.blocks(IN_MEMORY_BYTES):
            for copy in copies:
                copy.add(block)
        return copies


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
