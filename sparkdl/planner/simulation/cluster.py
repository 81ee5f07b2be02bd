"""The workers that a simulated training has, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkdl.arguments import convert_numbers, require_positive, require_whole
from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link
from sparkdl.planner.simulation.step_times import Seconds, StepTimes

NEVER = (math.inf, -1)
MOST_LOSSES = 2000
"""The most lost workers of an epoch."""
Note = Callable[[float, float, Any, int], None]
"""Told what workers do: from when, until when, the seconds that they together computed, waited and
exchanged in that time, and their lane of the timeline."""


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
        lanes: the most lanes of a timeline; if there are more workers, several share a lane.

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
    lanes: int = 32

    def __post_init__(self) -> None:
        convert_numbers(self)
        require_whole("workers", self.workers, 1)
        require_whole("workers_per_host", self.per_host, 1)
        lost = self.losses if isinstance(self.losses, Mapping) else {}
        for name, by_rank in (("slow", self.slow), ("losses", lost)):
            for rank, value in by_rank.items():
                if rank not in range(self.workers):
                    raise ConfigError(
                        f"{name} names rank {rank!r}, but {self.workers} workers have ranks 0 to "
                        f"{self.workers - 1}"
                    )
                require_positive(f"{name}[{rank}]", value)
        if not isinstance(self.losses, Mapping | None):
            require_positive("losses", self.losses)
        require_positive("restart_s", self.restart_s, or_zero=True)
        require_whole("seed", self.seed, 0)

    @property
    def slowness(self) -> Seconds:
        """How many times as long each rank's steps take, shape (workers,)."""
        slowness = np.ones(self.workers)
        slowness[list(self.slow)] = list(self.slow.values())
        return slowness

    @property
    def ranks_a_lane(self) -> int:
        """How many workers share a lane of a timeline."""
        return math.ceil(self.workers / self.lanes)

    def lost(self, generator: np.random.Generator) -> Iterator[tuple[float, int]]:
        """When workers are lost, and which, in the order of time; ``NEVER`` at last."""
        if isinstance(self.losses, Mapping):
            yield from sorted((float(at), rank) for rank, at in self.losses.items())
        elif self.losses is not None:
            at = 0.0
            for _ in range(MOST_LOSSES):
                at += float(generator.exponential(self.losses / self.workers))
                yield at, int(generator.integers(self.workers))
            raise ConfigError(
                f"after {MOST_LOSSES} lost workers and {at:.3g} s the epoch has not ended, and may "
                "never: give more seconds between two losses, or a shorter epoch or commit_every"
            )
        while True:
            yield NEVER


@dataclass(kw_only=True)
class Epoch:
    """What a simulated epoch comes to.

    Attributes:
        strategy: its name.
        rounds: exchanges of each worker.
        part: how much of the epoch was simulated; the other attributes are of that part, and the
            properties of the whole epoch.
        lasted: seconds that it took.
        did: seconds that all workers together computed; in which they waited for each other, for
            the driver, or for its link; and in which their own values were on their way.
        sent: bytes that passed the busiest link in its busier direction.
        driver: bytes that the driver sent and received.
        windows: contributions.
        staleness: how often others had moved the center since these began, in total.
        max_staleness: the most of that.
        lost: when workers were lost, and which; None for a restart of all.
    """

    strategy: str
    rounds: int
    part: float = 1.0
    lasted: float = 0.0
    did: Seconds = field(default_factory=lambda: np.zeros(3))
    sent: float = 0.0
    driver: float = 0.0
    windows: int = 0
    staleness: int = 0
    max_staleness: int = 0
    lost: list[tuple[float, int | None]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.lasted / self.part

    @property
    def figures(self) -> dict[str, Any]:
        """All of it by name, of the whole epoch; what workers do as parts of their time."""
        shares = self.did / max(float(self.did.sum()), 1e-300)
        return {
            "strategy": self.strategy,
            "seconds": self.seconds,
            **dict(zip(("computing", "waiting", "exchanging"), shares.tolist(), strict=True)),
            "rounds": self.rounds,
            "busiest_bytes": self.sent / self.part,
            "driver_bytes": self.driver / self.part,
            "mean_staleness": self.staleness / max(self.windows, 1),
            "max_staleness": self.max_staleness,
            "losses": round(len(self.lost) / self.part),
            "part": self.part,
        }
