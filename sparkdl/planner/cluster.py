"""The workers that a simulated training has, how fast they are, and what happened in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link
from sparkdl.planner.step_times import StepTimes

LANES = 32
"""The most lanes of a timeline; if there are more workers, several share a lane."""
MOST_LOSSES = 2000
"""The most lost workers of an epoch."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Who trains, over which links.

    Attributes:
        workers: how many.
        link: of every host, and of the driver's.
        times: how long the steps of a usual worker take.
        slow: how many times as long the steps of some ranks take.
        per_host: workers on each host.
        within: what connects the workers of a host.
        losses: seconds from the start after which ranks are lost, by rank; or seconds that pass on
            average between two losses of one worker. None if none is lost.
        restart_s: seconds until a lost worker, or with strategies that need each other all of them,
            can train again.
        seed: determines everything that is drawn.

    Raises:
        ConfigError: something is out of range.
    """

    workers: int
    link: Link
    times: StepTimes
    slow: Mapping[int, float] = field(default_factory=dict)
    per_host: int = 1
    within: Link = field(default_factory=lambda: Link(4e9, 1e-5))
    losses: float | Mapping[int, float] | None = None
    restart_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("workers", "per_host"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")
        lost = self.losses if isinstance(self.losses, Mapping) else {}
        for name, by_rank in (("slow", self.slow), ("losses", lost)):
            for rank, value in by_rank.items():
                if rank not in range(self.workers):
                    raise ConfigError(
                        f"{name} names rank {rank!r}, but {self.workers} workers have the ranks 0 "
                        f"to {self.workers - 1}"
                    )
                if not 0 < value < math.inf:
                    raise ConfigError(f"{name}[{rank}] must be a number > 0, got {value!r}")
        if not isinstance(self.losses, Mapping | None) and not 0 < self.losses < math.inf:
            raise ConfigError(f"losses must be a number of seconds > 0, got {self.losses!r}")
        if not 0 <= self.restart_s < math.inf:
            raise ConfigError(f"restart_s must be a number >= 0, got {self.restart_s!r}")

    @property
    def slowness(self) -> NDArray[np.float64]:
        """How many times as long each rank's steps take, shape (workers,)."""
        slowness = np.ones(self.workers)
        slowness[list(self.slow)] = list(self.slow.values())
        return slowness

    @property
    def ranks_a_lane(self) -> int:
        """How many workers share a lane of a timeline."""
        return math.ceil(self.workers / LANES)

    def lost(self, generator: np.random.Generator) -> Iterator[tuple[float, int]]:
        """When workers are lost, and which, in the order of time."""
        if isinstance(self.losses, Mapping):
            yield from sorted((at, rank) for rank, at in self.losses.items())
        elif self.losses is not None:
            at = 0.0
            while True:
                at += float(generator.exponential(self.losses / self.workers))
                yield at, int(generator.integers(self.workers))


class Stretch(NamedTuple):
    """What workers did in a stretch of time.

    Attributes:
        began: when it began on each lane, shape (lanes,); or for the ``lane`` given, a number.
        ended: when it ended, likewise.
        seconds: that the workers of a lane together computed, waited and exchanged, shape
            (3, lanes) or (3,).
        lane: the one; None for all.
    """

    began: Any
    ended: Any
    seconds: Any
    lane: int | None = None


@dataclass
class Outcome:
    """What happened in the part of an epoch that was simulated.

    Attributes:
        seconds: how long it took.
        computed: seconds that all workers together computed.
        waited: seconds that they waited for each other, or for the driver.
        exchanged: seconds in which they sent and received.
        rounds: exchanges; of each worker, where they are not the same for all.
        sent: bytes that passed the busiest link in its busier direction.
        driver: bytes that the driver sent and received.
        staleness: sum over the windows of how often others had moved the center.
        most_stale: the most of that.
        windows: contributions.
        lost: when workers were lost, and which; None for a restart of all.
        stretches: what workers did, lane by lane.
    """

    seconds: float = 0.0
    computed: float = 0.0
    waited: float = 0.0
    exchanged: float = 0.0
    rounds: int = 0
    sent: float = 0.0
    driver: float = 0.0
    staleness: int = 0
    most_stale: int = 0
    windows: int = 0
    lost: list[tuple[float, int | None]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)

    def lose(self, at: float, rank: int | None) -> None:
        """Take note that a worker is lost.

        Raises:
            ConfigError: so many have been that the epoch will not end.
        """
        self.lost.append((at, rank))
        if len(self.lost) > MOST_LOSSES:
            raise ConfigError(
                f"after {at:.3g} s and {MOST_LOSSES} lost workers the epoch has not ended: with "
                "so many losses it never will. Give more seconds between two losses, or a shorter "
                "epoch or commit_every"
            )
