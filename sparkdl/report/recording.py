"""What is recorded of a training as it runs: bounded, whatever its length or number of workers.

The driver passes it every event. Times are seconds since it began, by the driver's monotonic clock.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sparkdl.averager.run_events import (
    EpochValidated,
    RunEvent,
    WorkerLost,
    WorkersRestarted,
    WorkerTimes,
)
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.phases import COMPUTE, DECODE, PHASES
from sparkdl.planner.profile import Fit
from sparkdl.report.time_bins import TimeBins
from sparkdl.untrusted import read

LANES = 32
"""The most lanes for workers' time; if there are more workers, several share a lane."""
WINDOWS = 4096
"""How many windows' times are kept, the last ones."""
FAILURES = 100
"""How many failures are kept in full; all of them are counted."""
BUSY = [DECODE, COMPUTE]
"""The phases that a worker spends by itself; the rest is the others' time, or the network's."""


@dataclass(frozen=True, kw_only=True)
class Setup(Fit):
    """What was to be trained, and how.

    Attributes:
        period: steps between two rounds; None where the strategy has no such number.
        collective: whether the workers exchange among themselves.
        wire_dtype: the dtype of values sent to the driver; None if it cannot be chosen.
        epochs: passes over the rows.
        parameters: numbers in the model that are trained or frozen.
        settings: what else to show, by name.
        loss_use: what the loss divides by, in words by name; empty before the rows are known.
    """

    period: int | None = None
    collective: bool = False
    wire_dtype: str | None = None
    epochs: int = 1
    parameters: int = 0
    settings: Mapping[str, object] = field(default_factory=dict)
    loss_use: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that was lost, or a restart of all of them.

    Attributes:
        at: seconds since the recording began.
        rank: the worker's; None if all were restarted.
        why: the reason in words.
    """

    at: float
    rank: int | None
    why: str


_BY_RANK: dict[str, tuple[int, ...]] = {
    "seconds": (len(PHASES),),
    "before_training": (len(PHASES),),
    "sent": (),
    "received": (),
    "rows": (),
    "windows": (),
}
"""Attributes with a row for each worker, and the shape of that: seconds, or else counts."""
_LATER: Any = None
"""Until the number of workers is known."""


@dataclass(eq=False)
class Recording:
    """Adds up what workers and averager report.

    Attributes:
        world_size: the most workers that there have been at a time.
        setup: what is trained, and how.
        most: how many workers there may be later; 0 for no more.
        history: one summary per epoch that has ended, including those before this fit.
        epochs_before: how many of them were trained before.
        started_at: when the recording began, in seconds since 1970.
        hosts: by rank; empty until the worker has been heard from.
        shard_rows: each worker's rows as it last read them, by rank.
        held_out_rows: of all workers.
        seconds: by rank and phase, shape (world_size, len(PHASES)).
        before_training: those that passed before a worker's first step.
        first_epoch: ``seconds`` and ``rows`` when the first epoch of this fit ended, which warms
            up; None before that.
        sent: bytes to the driver, by rank.
        received: bytes from the driver, by rank.
        uncertainty_s: how far off workers' times may be, in seconds.
        rows: trained on, by rank.
        windows: rounds that each rank took part in.
        window_times: rank, rows, and seconds of computing and decoding of the last windows.
        trained: rows, loss sum, its divisor and windows by time.
        lanes: seconds by time, lane and phase.
        failures: the first of them.
        num_failures: how many there were in total.
        launched_s: when the first worker began; None before that.
        lasted_s: how long all of it took; None while it runs.
        outcome: how it ended; None while it runs.
        error: what ended it, in words, if it failed.
    """

    world_size: int
    setup: Setup = field(default_factory=Setup)
    most: int = 0
    history: list[EpochSummary] = field(default_factory=list)
    epochs_before: int = 0
    started_at: float = field(default_factory=lambda: time.time())
    hosts: list[str] = field(default_factory=list)
    shard_rows: tuple[int, ...] = ()
    held_out_rows: int = 0
    seconds: NDArray[np.float64] = _LATER
    before_training: NDArray[np.float64] = _LATER
    first_epoch: tuple[NDArray[np.float64], NDArray[np.int64]] | None = None
    sent: NDArray[np.int64] = _LATER
    received: NDArray[np.int64] = _LATER
    uncertainty_s: float = 0.0
    rows: NDArray[np.int64] = _LATER
    windows: NDArray[np.int64] = _LATER
    window_times: list[tuple[int, int, float]] = field(default_factory=list)
    trained: TimeBins = _LATER
    lanes: TimeBins = _LATER
    failures: list[Failure] = field(default_factory=list)
    num_failures: int = 0
    launched_s: float | None = None
    lasted_s: float | None = None
    outcome: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        # Seconds of windows that the driver has yet to be told of.
        self._busy: dict[int, float] = {}
        if self.seconds is None:  # else it comes from another process
            self.hosts = [""] * self.world_size
            for name, row in _BY_RANK.items():
                shape = (self.world_size, *row)
                setattr(self, name, np.zeros(shape, np.float64 if row else np.int64))
            self.lanes = TimeBins.of(math.ceil(self.world_size / self.ranks_a_lane), len(PHASES))
            self.trained = TimeBins.of(4)

    @property
    def ranks_a_lane(self) -> int:
        """How many workers share a lane."""
        return math.ceil(max(self.world_size, self.most) / LANES)

    @property
    def duration_s(self) -> float:
        """Seconds from beginning to end, or until now."""
        return time.monotonic() - self._began if self.lasted_s is None else self.lasted_s

    def window_ratios(self, batch_size: int) -> tuple[NDArray[np.float64], int]:
        """How much the workers' windows have varied.

        Args:
            batch_size: rows per step.

        Returns:
            The seconds that windows of the usual length took, over the mean of their worker's, and
            how many steps that length is.
        """
        if not self.window_times:
            return np.empty(0), 1
        ranks, rows, seconds = map(np.asarray, zip(*self.window_times, strict=True))
        lengths, counts = np.unique(rows, return_counts=True)
        usual = lengths[counts.argmax()]
        ranks, seconds = ranks[rows == usual], seconds[rows == usual]
        sums, counts = (np.bincount(ranks, weights) for weights in (seconds, None))
        ratios = seconds * (counts / np.maximum(sums, 1e-300))[ranks]
        return ratios, max(1, round(int(usual) / batch_size))

    def begin(self, history: Sequence[EpochSummary]) -> None:
        """Note the epochs that were trained before, by a fit that this one continues."""
        self.history, self.epochs_before = list(history), len(history)

    def resize(self, world_size: int) -> None:
        """Make room for more workers; those who have left stay in the record."""
        more = world_size - self.world_size
        if more <= 0:
            return
        self.world_size = world_size
        self.hosts += [""] * more
        for name in _BY_RANK:
            setattr(self, name, _longer(getattr(self, name), more))
        if self.first_epoch is not None:
            seconds, rows = self.first_epoch
            self.first_epoch = _longer(seconds, more), _longer(rows, more)
        lanes = math.ceil(world_size / self.ranks_a_lane) - self.lanes.sums.shape[1]
        self.lanes.sums = np.pad(self.lanes.sums, ((0, 0), (0, lanes), (0, 0)))

    def note_shards(self, rows: Sequence[int]) -> None:
        """Note the rows that each worker has read; those that have left read none."""
        self.shard_rows = (*rows, *(0,) * (self.world_size - len(rows)))

    def note(self, event: RunEvent) -> None:
        """Record something that has happened."""
        match event:
            case WorkerTimes():
                self._note_times(event)
            case WindowReport():
                self._note_window(event)
            case EpochSummary():
                # Fewer workers train an epoch again if one is lost before it is validated.
                before = [each for each in self.history if each.epoch < event.epoch]
                self.history = [*before, event]
                # Validation is told of with the first window of the next epoch.
                self._busy = dict.fromkeys(self._busy, math.nan)
                if self.first_epoch is None:
                    self.first_epoch = self.seconds.copy(), self.rows.copy()
            case EpochValidated(summary):
                if self.history and self.history[-1].epoch == summary.epoch:
                    self.history[-1] = summary
            case DataStatistics():
                self.held_out_rows = event.held_out
                self.note_shards(event.shard_rows)
            case WorkerLost(rank, why):
                self._note_failure(rank, why)
            case WorkersRestarted(why):
                self._note_failure(None, why)

    def end(
        self, outcome: str, history: Sequence[EpochSummary] = (), error: str | None = None
    ) -> None:
        """Record the end.

        Args:
            outcome: how it ended, in a word or two.
            history: the epochs that have ended, with all that is known about them.
            error: why it failed, if it did.
        """
        self.lasted_s = time.monotonic() - self._began
        self.outcome, self.error = outcome, error
        self.history = list(history) or self.history

    def as_json(self) -> dict[str, Any]:
        """Return what was recorded in JSON's types, for ``from_json``; no ``settings``."""
        told = asdict(
            replace(self, setup=replace(self.setup, settings={}), lasted_s=self.duration_s)
        )
        return cast("dict[str, Any]", json.loads(json.dumps(told, default=np.ndarray.tolist)))

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Recording:
        """Restore what ``as_json`` has returned.

        Raises:
            ArithmeticError, TypeError, ValueError: it is something else.
        """
        found: Recording = read(cls, told, whole=True)
        ranks = {rank for rank, *_ in found.window_times}
        ranks |= {each.rank for each in found.failures if each.rank is not None}
        of_as_many = cls(len(found.hosts), most=found.most)
        if found._shapes != of_as_many._shapes or not ranks <= {*range(found.world_size)}:
            raise ValueError(f"what was recorded is not that of {len(found.hosts)} workers")
        return found

    @property
    def _shapes(self) -> list[Any]:
        arrays = [getattr(self, name) for name in _BY_RANK]
        arrays += [*(self.first_epoch or (self.seconds, self.rows))]
        arrays += [self.lanes.sums, self.trained.sums]
        return [self.world_size, *(each.shape for each in arrays)]

    def _note_times(self, event: WorkerTimes) -> None:
        times, rank = event.times, event.rank
        now = time.monotonic() - self._began
        # Whoever holds the token may claim anything, but cannot come from the future.
        began = min(max(times.began - self._began, 0.0), now)
        ended = min(max(times.ended - self._began, began), now)
        seconds = np.minimum(np.asarray(times.seconds), now)
        self.hosts[rank] = event.host
        if self.launched_s is None:
            self.launched_s = began
        if not self.seconds[rank, COMPUTE] and not seconds[COMPUTE]:
            self.before_training[rank] += seconds
        elif rank in self._busy:
            self._busy[rank] += float(seconds[COMPUTE] + seconds[DECODE])
        else:
            # The first window warms up: it is not like the others.
            self._busy[rank] = math.nan
        self.seconds[rank] += seconds
        self.sent[rank] += times.sent
        self.received[rank] += times.received
        self.uncertainty_s = max(self.uncertainty_s, times.uncertainty)
        self.lanes.add(began, ended, seconds, rank // self.ranks_a_lane)

    def note_loss_use(self, told: Mapping[str, str]) -> None:
        """Take note of how the loss is used, in words by name."""
        self.setup = replace(self.setup, loss_use=dict(told))

    def _note_window(self, event: WindowReport) -> None:
        now = time.monotonic() - self._began
        busy = self._busy.get(event.rank, math.nan)
        if busy > 0:
            self.window_times.append((event.rank, event.examples, busy))
            del self.window_times[:-WINDOWS]
        self._busy[event.rank] = 0.0
        self.rows[event.rank] += event.examples
        self.windows[event.rank] += 1
        if math.isfinite(event.loss_sum):
            values = np.array([event.examples, event.loss_sum, event.divisor, 1.0])
            self.trained.add(now, now, values)

    def _note_failure(self, rank: int | None, why: str) -> None:
        self.num_failures += 1
        if len(self.failures) < FAILURES:
            self.failures.append(Failure(time.monotonic() - self._began, rank, why))


def _longer(values: NDArray[Any], more: int) -> NDArray[Any]:
    """The same with zeros for more ranks."""
    return np.pad(values, ((0, more), *[(0, 0)] * (values.ndim - 1)))
