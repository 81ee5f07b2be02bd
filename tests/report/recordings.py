"""Recordings of trainings that never were, by a clock that goes on when told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparkdl.averager.run_events import WorkerTimes
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.phases import PHASES, PhaseTimes
from sparkdl.report import Recording, Setup, recording

DEFAULTS: dict[str, Any] = {
    "model": "Net",
    "strategy": "ParameterAveraging(period=5)",
    "period": 5,
    "aggregation": "driver",
    "wire_dtype": "float32",
    "epochs": 20,
    "batch_size": 32,
    "parameters": 1000,
    "trained": 900,
    "model_bytes": 4000,
}


class Played:
    """A recording, and the clock that it looks at.

    Args:
        world_size: number of workers.
        **setup: what differs from ``DEFAULTS``.
    """

    def __init__(self, world_size: int, **setup: Any) -> None:
        self.now = 1000.0
        self.recording = Recording(world_size, Setup(**{**DEFAULTS, **setup}))
        self.at = [self.now] * world_size

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.8e9

    def spend(self, rank: int, host: str = "host", **seconds: float) -> None:
        """A worker tells of a stretch of time right behind the last one, by phase."""
        began = self.at[rank]
        by_phase = tuple(float(seconds.get(name, 0.0)) for name in PHASES)
        self.at[rank] = began + sum(by_phase)
        self.now = max(self.now, self.at[rank])
        times = PhaseTimes(began, self.at[rank], by_phase, 4000, 4000, 1e-3)
        self.recording.note(WorkerTimes(rank, host, times))

    def window(self, rank: int, examples: int = 10, loss: float = 1.0, epoch: int = 1) -> None:
        said = {"rank": rank, "epoch": epoch, "step": 1, "examples": examples, "last": False}
        self.recording.note(WindowReport(loss_sum=loss * examples, **said))

    def epoch(self, number: int, **fields: Any) -> None:
        known = {"loss": 1.0 / number, "examples": 100, "rounds": 5, "seconds": 2.0}
        self.recording.note(EpochSummary(epoch=number, **{**known, **fields}))

    def rows(self, *shard_rows: int) -> None:
        self.recording.note(DataStatistics(shard_rows, ()))


Play = Callable[..., Played]


def playing(monkeypatch: pytest.MonkeyPatch) -> Play:
    def play(world_size: int, **setup: Any) -> Played:
        # Before the recording is made: it remembers when that was.
        clock = type("Clock", (), {"now": 1000.0})()
        clock.monotonic = lambda: clock.now
        clock.time = lambda: 1.8e9
        monkeypatch.setattr(recording, "time", clock)
        played = Played(world_size, **setup)
        monkeypatch.setattr(recording, "time", played)
        return played

    return play


def busy_world(play: Play, world_size: int, windows: int, **setup: Any) -> Played:
    """Everyone reads for 4 s and then trains, each window 1 s long."""
    played = play(world_size, **setup)
    for rank in range(world_size):
        played.spend(rank, host=f"host-{rank}", read=3.0, decode=1.0)
    played.rows(*[100] * world_size)
    for number in range(windows):
        for rank in range(world_size):
            played.spend(rank, f"host-{rank}", decode=0.1, compute=0.4, wait=0.3, exchange=0.2)
            played.window(rank, loss=1.0 / (1 + number))
    return played
