"""What it costs that workers tell where their time goes: the same training with and without.

Both are trained by the same workers' loop and averager, in turns. Without, the clock stands still
and nothing is told or kept. A turn is one whole training; what is compared is the processor time of
all its threads, workers and averager, in the epochs after the first, which has what a process does
once: the time on a wall says more of what else runs on the machine.
"""

import functools
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import harness
import numpy as np
import torch
from torch import nn

from sparkdl import ParameterAveraging, worker
from sparkdl.averager.client import AveragerClient
from sparkdl.events import EpochSummary
from sparkdl.feed.columns import FeedSchema
from sparkdl.phases import PhaseClock
from sparkdl.protocols import ColumnSpec
from sparkdl.report import Recording
from sparkdl.strategies import Strategy
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

ROWS = 8_000
WIDTH = 100
EPOCHS = 4
TARGET = 1.01
CLOCK = {name: vars(PhaseClock)[name] for name in ("switch", "phase", "each")}
"""What the clock does otherwise."""


class Still:
    """What a clock does that counts nothing and costs as little as a call can."""

    @staticmethod
    def switch(clock: PhaseClock, phase: int) -> int:
        return phase

    @staticmethod
    def phase(clock: PhaseClock, phase: int) -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def each(clock: PhaseClock, phase: int, items: Any) -> Any:
        return items


class Untold(AveragerClient):
    """A worker's end of the averager that says nothing of times."""

    def __init__(self, *args: Any, clock: PhaseClock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def mlp() -> nn.Module:
    """78 thousand parameters: a step takes about half a millisecond, and a round as long."""
    hidden = [nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 200), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(200, 10))


def built(told: bool) -> nn.Module:
    """Called by each worker, which has just made its clock and not yet connected."""
    if not told:
        for name in ("switch", "phase", "each"):
            function = getattr(Still, name)
            setattr(PhaseClock, name, lambda *given, function=function: function(*given))
        worker.AveragerClient = Untold  # type: ignore[misc]
    return mlp()


def train(told: bool, shards: list[Any], strategy: Strategy[Any]) -> float:
    """Seconds of processor time, of workers and averager, of the epochs behind the first."""
    job = Job(
        model=functools.partial(built, told),
        loss=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        strategy=strategy,
        schema=FeedSchema(
            (ColumnSpec("x", torch.float32, (WIDTH,)),), ColumnSpec("y", torch.int64)
        ),
        epochs=EPOCHS,
        batch_size=32,
        seed=1,
        deadline_s=300.0,
    )
    ends: list[float] = []

    def on_event(event: object) -> None:
        if isinstance(event, EpochSummary):
            ends.append(time.process_time())

    note = Recording.note
    if not told:
        Recording.note = lambda self, event: None  # type: ignore[method-assign]
    try:
        run_world(job, shards, on_event=on_event)
    finally:
        Recording.note = note  # type: ignore[method-assign]
        worker.AveragerClient = AveragerClient  # type: ignore[misc]
        for name, function in CLOCK.items():
            setattr(PhaseClock, name, function)
    return ends[-1] - ends[0]


def cost_of_a_switch() -> float:
    """Seconds of a clock's time that a minibatch takes: two switches."""
    clock, turns = PhaseClock(), 200_000
    began = time.perf_counter()
    for _ in range(turns):
        clock.switch(1)
        clock.switch(2)
    return (time.perf_counter() - began) / turns


def main() -> None:
    """Measures, prints and judges."""
    options = harness.arguments(__doc__, repeats=15, quick_repeats=3)
    draws = np.random.default_rng(0)
    shards = [
        batches_of(
            2000,
            x=draws.normal(size=(ROWS // 2, WIDTH)).astype(np.float32),
            y=draws.integers(0, 10, ROWS // 2),
        )
        for _ in range(2)
    ]
    torch.set_num_threads(1)
    claims, facts = [], {"switches_us": round(1e6 * cost_of_a_switch(), 3)}
    for period in (5, 1):
        name, strategy = f"period {period}", ParameterAveraging(period)
        measured = harness.interleave(
            {
                "told": functools.partial(train, True, shards, strategy),
                "untold": functools.partial(train, False, shards, strategy),
            },
            repeats=options.repeats,
            warmups=1,
        )
        for kind, values in measured.items():
            facts[f"{kind}, {name}"] = harness.show(f"{kind}, {name}", values)
        # Pair by pair: what else runs on the machine changes from minute to minute.
        ratios = [a / b for a, b in zip(measured["told"], measured["untold"], strict=True)]
        claims.append(
            harness.Claim(
                name=f"telling / not telling, {name}",
                ratio=statistics.median(ratios),
                target=TARGET,
            )
        )
    harness.report("report_overhead", claims, facts)


if __name__ == "__main__":
    main()
