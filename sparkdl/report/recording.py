"""What is recorded of a training as it runs: bounded, whatever its length or number of workers.

The driver passes it every event. Times are seconds since it began, by the driver's monotonic clock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

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
from sparkdl.report.time_bins import TimeBins, array_of
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


class Recording:
    """Adds up what workers and averager report.

    Args:
        world_size: number of workers.
        setup: what is trained, and how.
        most: how many workers there may be later; by default no more.

    Attributes:
        setup: as given.
        world_size: the most workers that there have been at a time.
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
        trained: rows, loss sum, its divisor and windows by time.
        lanes: seconds by time, lane and phase.
        ranks_a_lane: how many workers share a lane.
        failures: the first of them.
        num_failures: how many there were in total.
        launched_s: when the first worker began; None before that.
        outcome: how it ended; None while it runs.
        error: what ended it, in words, if it failed.
    """

    def __init__(self, world_size: int, setup: Setup | None = None, *, most: int = 0) -> None:
        self.setup = setup or Setup()
        self.history: list[EpochSummary] = []
        self.epochs_before = 0
        self.started_at = time.time()
        self.world_size = world_size
        self.hosts = [""] * world_size
        self.shard_rows: tuple[int, ...] = ()
        self.held_out_rows = 0
        self.seconds = np.zeros((world_size, len(PHASES)))
        self.before_training = np.zeros((world_size, len(PHASES)))
        self.first_epoch: tuple[NDArray[np.float64], NDArray[np.int64]] | None = None
        self.sent = np.zeros(world_size, dtype=np.int64)
        self.received = np.zeros(world_size, dtype=np.int64)
        self.uncertainty_s = 0.0
        self.ranks_a_lane = math.ceil(max(world_size, most) / LANES)
        self.lanes = TimeBins(math.ceil(world_size / self.ranks_a_lane), len(PHASES))
        self.rows = np.zeros(world_size, dtype=np.int64)
        self.windows = np.zeros(world_size, dtype=np.int64)
        self.trained = TimeBins(4)
        # Rank, rows, and seconds of computing and decoding of the last windows; and those seconds
        # of windows that the driver has yet to be told of.
        self._window_times: deque[tuple[int, int, float]] = deque(maxlen=WINDOWS)
        self._busy: dict[int, float] = {}
        self.failures: list[Failure] = []
        self.num_failures = 0
        self.launched_s: float | None = None
        self.outcome: str | None = None
        self.error: str | None = None
        self._began = time.monotonic()
        self._ended: float | None = None

    @property
    def duration_s(self) -> float:
        """Seconds from beginning to end, or until now."""
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    def window_ratios(self, batch_size: int) -> tuple[NDArray[np.float64], int]:
        """How much the workers' windows have varied.

        Args:
            batch_size: rows per step.

        Returns:
            The seconds that windows of the usual length took, over the mean of their worker's, and
            how many steps that length is.
        """
        if not self._window_times:
            return np.empty(0), 1
        ranks, rows, seconds = map(np.asarray, zip(*self._window_times, strict=True))
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
        for name in _ARRAYS:
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
        self._ended = time.monotonic()
        self.outcome, self.error = outcome, error
        self.history = list(history) or self.history

    def as_json(self) -> dict[str, Any]:
        """Return what was recorded in JSON's types, for ``from_json``; no ``settings``."""
        first = self.first_epoch
        return {
            "setup": asdict(replace(self.setup, settings={})),
            "history": list(map(asdict, self.history)),
            "failures": list(map(astuple, self.failures)),
            "window_times": list(self._window_times),
            "first_epoch": first and [each.tolist() for each in first],
            "duration_s": self.duration_s,
            "lanes": self.lanes.as_json(),
            "trained": self.trained.as_json(),
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: getattr(self, name).tolist() for name in _ARRAYS},
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Recording:
        """Restore what ``as_json`` has returned.

        Raises:
            ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it is something
                else.
            TrainingError: the same.
        """
        workers = len(told["hosts"])
        recording = cls(workers, read(Setup, told["setup"]))
        recording.history = read(list[EpochSummary], told["history"])
        for name, hint in _PLAIN.items():
            setattr(recording, name, read(hint, told[name], name))
        for name, dtype in _ARRAYS.items():
            shape = getattr(recording, name).shape
            setattr(recording, name, array_of(told[name], shape, dtype))
        if (first := told["first_epoch"]) is not None:
            seconds, rows = first
            recording.first_epoch = (
                array_of(seconds, recording.seconds.shape),
                array_of(rows, (workers,), np.int64),
            )
        lanes = recording.lanes.sums.shape[1:]
        recording.lanes = TimeBins.from_json(told["lanes"], *lanes)
        recording.trained = TimeBins.from_json(told["trained"], 4)
        for rank, rows, busy in told["window_times"]:
            recording._window_times.append((range(workers)[rank], int(rows), float(busy)))
        for at, rank, why in told["failures"]:
            lost = None if rank is None else range(workers)[rank]
            recording.failures.append(Failure(float(at), lost, str(why)))
        recording._ended = recording._began + float(told["duration_s"])
        return recording

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
            self._window_times.append((event.rank, event.examples, busy))
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


_PLAIN: dict[str, Any] = {
    "epochs_before": int,
    "started_at": float,
    "hosts": list[str],
    "shard_rows": tuple[int, ...],
    "held_out_rows": int,
    "uncertainty_s": float,
    "num_failures": int,
    "launched_s": float | None,
    "outcome": str | None,
    "error": str | None,
}
"""Attributes that travel as they are."""
_ARRAYS: dict[str, DTypeLike] = {
    "seconds": np.float64,
    "before_training": np.float64,
    "sent": np.int64,
    "received": np.int64,
    "rows": np.int64,
    "windows": np.int64,
}
"""Attributes whose shapes the number of workers gives."""
