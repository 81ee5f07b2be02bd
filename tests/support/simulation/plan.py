"""What a simulated run is like, and what goes wrong in it: everything determined by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

OTHER_DELAYS = 10


class Kind(Enum):
    """What may go wrong."""

    BREAK = "the worker's connection breaks, and it connects again at once"
    HALF_OPEN = "the same, but the averager notices only after the worker is back"
    KILL = "the worker's process dies; another attempt starts later"
    TWIN = "another attempt starts although the worker lives"
    STALL = "the worker does nothing for a while"
    PAUSE = "the averager does nothing for a while, and nothing reaches it"
    PREEMPT = "the driver is told to end, once a commit has become a checkpoint"
    SLOW_STORAGE = "checkpoints take long to be written from here on"
    FAILING_STORAGE = "checkpoints cannot be written for a while"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: what goes wrong.
        after: how many events the averager has seen before it.
        rank: the rank of the worker that it strikes.
        seconds: how long it lasts, or until the next attempt starts.
    """

    kind: Kind
    after: int
    rank: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        seed: determines the links' delays and the workers' speeds.
        windows: windows of each rank per epoch; 0 for a rank without rows.
        deals: those of epochs 2, 3, ..., where other workers begin them.
        epochs: the number of epochs.
        chunks: the number of messages that make up a contribution.
        every_rounds: rounds between two checkpoints; None for checkpoints only at ends of epochs.
        saves: whether checkpoints are written at all.
        max_failures: how many losses the run survives.
        min_workers: the fewest workers with which rounds go on.
        gathers: whether workers gather something before each epoch; not if they may be lost.
        validates: whether workers validate after each epoch, and begin the next one only once they
            know what all found.
        exchanges_rows: whether workers fetch rows from each other; a lost one may then have to be
            back before others can contribute.
        resubmissions: how often all workers are restarted after a loss has failed the run.
        window_s: seconds that a window takes, on average.
        delay_s: the longest that a message is in flight, in seconds.
        pass_s: how long the averager takes for what it found at one look, in seconds; what arrives
            meanwhile is found at the next, all at once.
        faults: what goes wrong.
    """

    seed: int
    windows: tuple[int, ...]
    deals: tuple[tuple[int, ...], ...] = ()
    epochs: int = 2
    chunks: int = 2
    every_rounds: int | None = None
    saves: bool = False
    max_failures: int = 100
    min_workers: int = 1
    gathers: bool = False
    validates: bool = False
    exchanges_rows: bool = False
    resubmissions: int = 0
    window_s: float = 1.0
    delay_s: float = 0.5
    pass_s: float = 0.0
    faults: tuple[Fault, ...] = ()

    def windows_in(self, epoch: int) -> tuple[int, ...]:
        """Windows of each rank in an epoch."""
        return (self.windows, *self.deals)[min(epoch - 1, len(self.deals))]


def random_plan(seed: int, *, times: int = 1) -> Plan:
    """Draw a plan; the same seed gives the same plan.

    Args:
        seed: determines everything that is drawn.
        times: multiplies the windows per epoch, for faults that take a while to show.
    """
    draw = random.Random(seed)
    workers = draw.choice((1, 2, 2, 3, 3, 4))
    windows = tuple(times * draw.choice((0, 1, 1, 2, 3)) for _ in range(workers))
    saves = draw.random() < 0.6
    tolerant = draw.random() < 0.85
    anywhere = tuple(kind for kind in Kind if kind is not Kind.FAILING_STORAGE)
    faults = tuple(
        Fault(
            draw.choice(anywhere),
            after=draw.randrange(1, 30 * workers),
            rank=draw.randrange(workers),
            seconds=draw.choice((0.1, 2.0, 20.0)),
        )
        for _ in range(draw.choice((0, 1, 1, 2, 3, 5)))
    )
    plan = Plan(
        seed=seed,
        windows=windows,
        epochs=draw.choice((1, 2, 3)),
        chunks=draw.choice((1, 2, 3)),
        every_rounds=draw.choice((None, 1, 2)) if saves else None,
        saves=saves,
        max_failures=100 if tolerant else 0,
        min_workers=draw.choice((1, 1, workers)),
        gathers=not tolerant and draw.random() < 0.5,
        resubmissions=0 if tolerant else draw.choice((0, 100)),
        window_s=draw.choice((0.1, 1.0, 5.0)),
        delay_s=draw.choice((0.01, 0.5, 2.0)),
        faults=faults,
        validates=draw.random() < 0.3,
        exchanges_rows=draw.random() < 0.3,
    )
    if saves and draw.random() >= 0.7:
        after, seconds = draw.randrange(1, 30 * workers), draw.choice((0.1, 2.0, 20.0))
        failing = Fault(Kind.FAILING_STORAGE, after, seconds=seconds)
        plan = replace(plan, faults=(*faults, failing))
    return replace(plan, pass_s=draw.choice((0.0, 0.0, plan.delay_s / 2)))


def random_deals(seed: int) -> Plan:
    """Draw a plan whose workers' number changes between epochs."""
    plan, draw = random_plan(seed), random.Random(f"deals {seed}")
    epochs = draw.choice((2, 3, 4))
    deals = tuple(
        tuple(draw.choice((0, 1, 1, 2, 3)) for _ in range(draw.choice((1, 2, 3, 4))))
        for _ in range(epochs - 1)
    )
    # Those who gather may not be lost, and would all be restarted: that number does not change.
    return replace(
        plan,
        epochs=epochs,
        deals=deals,
        gathers=False,
        max_failures=100,
        resubmissions=0,
        min_workers=1,
    )


def shrink(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Make a failing plan smaller, as long as it fails."""
    while smaller := next(filter(fails, _smaller(plan)), None):
        plan = smaller
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    # What is left of the faults may need other delays.
    for seed in (plan.seed, *range(OTHER_DELAYS)):
        for index in range(len(plan.faults)):
            rest = plan.faults[:index] + plan.faults[index + 1 :]
            yield replace(plan, faults=rest, seed=seed)
    if plan.epochs > 1:
        yield replace(plan, epochs=plan.epochs - 1)
    if plan.chunks > 1:
        yield replace(plan, chunks=1)
    *fewer, _ = windows = plan.windows
    if fewer and len(fewer) not in {fault.rank for fault in plan.faults}:
        yield replace(plan, windows=tuple(fewer), min_workers=min(plan.min_workers, len(fewer)))
    for rank, count in enumerate(windows):
        if count > 1:
            yield replace(plan, windows=(*windows[:rank], count - 1, *windows[rank + 1 :]))
