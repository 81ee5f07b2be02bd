"""What it costs that workers report where their time goes: the same training with and without.

One training whose epochs alternate: in some of them, clocks stand still and nothing is reported or
kept. What is compared is the processor time of all threads, workers and averager, because wall time
says more about what else runs on the machine. Epochs come in blocks of eight, each kind with the
same places: in (told, not, not, told) alone, the same code on both sides differed by 2 to 4 %. So a
machine that slows down meanwhile slows both; a repeat is a block.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import harness
import numpy as np
import torch
from torch import nn

from sparkdl import ParameterAveraging
from sparkdl.averager.client.worker_channel import TimeReports
from sparkdl.averager.messages.run_events import RunEvent, WorkerTimes
from sparkdl.events import EpochSummary
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.phases import PhaseClock
from sparkdl.protocols import ColumnSpec
from sparkdl.report import Recording
from sparkdl.strategies import Strategy
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job

ROWS = 8_000
WIDTH = 100
TARGET = 1.01
BLOCK = (True, False, False, True, False, True, True, False)
"""Whether workers report, for the epochs of a block."""


class Still:
    """The methods of a clock that counts nothing and costs as little as a call can.

    ``PhaseClock.each`` stays: an epoch's iterator may be made before its turn begins. Besides its
    switches, it costs a thousandth of what can be resolved here.
    """

    @staticmethod
    def switch(clock: PhaseClock, phase: int) -> int:
        return phase

    @staticmethod
    def phase(clock: PhaseClock, phase: int) -> AbstractContextManager[None]:
        return nullcontext()


def silent(reports: TimeReports) -> dict[str, Any]:
    """What a worker's messages say about times if it reports nothing."""
    return {}


class Turns:
    """Switches the reports of this process's workers on and off, and checks that this works.

    Attributes:
        heard: how often a worker has reported its time since the last turn began.
    """

    def __init__(self) -> None:
        self.heard = 0
        note = Recording.note

        def told(recording: Recording, event: RunEvent) -> None:
            self.heard += isinstance(event, WorkerTimes)
            note(recording, event)

        def untold(recording: Recording, event: RunEvent) -> None:
            self.heard += isinstance(event, WorkerTimes)

        self._original: list[tuple[type, str, Callable[..., Any]]] = [
            (PhaseClock, "switch", PhaseClock.switch),
            (PhaseClock, "phase", PhaseClock.phase),
            (TimeReports, "header", TimeReports.header),
            (Recording, "note", note),
        ]
        self._ways = {
            True: [*self._original[:-1], (Recording, "note", told)],
            False: [
                (PhaseClock, "switch", Still.switch),
                (PhaseClock, "phase", Still.phase),
                (TimeReports, "header", silent),
                (Recording, "note", untold),
            ],
        }

    def take(self, tells: bool) -> None:
        """Begin a turn."""
        self.heard = 0
        self._set(self._ways[tells])

    def end(self, tells: bool) -> None:
        """End the turn.

        Raises:
            RuntimeError: both kinds of turns are the same, because the patched code has moved.
        """
        if (self.heard > 0) != tells:
            raise RuntimeError(
                f"in an epoch with telling={tells} workers told of their time {self.heard} times"
            )

    def restore(self) -> None:
        """Undo all patches."""
        self._set(self._original)

    def _set(self, ways: list[tuple[type, str, Callable[..., Any]]]) -> None:
        for owner, name, function in ways:
            setattr(owner, name, function)


def mlp() -> nn.Module:
    """78 thousand parameters: a step takes about half a millisecond, and so does a round."""
    hidden = [nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 200), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(200, 10))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer."""
    return torch.optim.SGD(parameters, lr=0.01)


def train(blocks: int, shards: list[Any], strategy: Strategy[Any]) -> dict[bool, list[float]]:
    """Processor seconds, of workers and averager, for each epoch after the first."""
    turns = Turns()
    # The first epoch includes what a process does only once.
    plan = [True, *BLOCK * blocks]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    began: list[float] = []

    def on_event(event: object) -> None:
        if not isinstance(event, EpochSummary):
            return
        now = time.process_time()
        done = plan[event.epoch - 1]
        turns.end(done)
        if began:
            seconds[done].append(now - began[-1])
        if event.epoch < len(plan):
            turns.take(plan[event.epoch])
        began.append(time.process_time())

    job = Job(
        model=mlp,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        strategy=strategy,
        schema=FeedSchema(
            (ColumnSpec("x", torch.float32, (WIDTH,)),), ColumnSpec("y", torch.int64)
        ),
        epochs=len(plan),
        batch_size=32,
        seed=1,
        deadline_s=300.0,
    )
    turns.take(plan[0])
    try:
        run_world(job, shards, on_event=on_event)
    finally:
        turns.restore()
    return seconds


def cost_of_a_switch() -> float:
    """Seconds that the clock costs per minibatch: two switches."""
    clock, turns = PhaseClock(), 200_000
    began = time.perf_counter()
    for _ in range(turns):
        clock.switch(1)
        clock.switch(2)
    return (time.perf_counter() - began) / turns


def main() -> None:
    """Measures, prints and judges."""
    options = harness.arguments(__doc__, repeats=100, quick_repeats=2)
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
        name = f"period {period}"
        seconds = train(options.repeats, shards, ParameterAveraging(period))
        for tells, kind in ((True, "told"), (False, "untold")):
            facts[f"{kind}, {name}"] = harness.show(f"{kind}, {name}", seconds[tells])
        told, untold = (
            np.array(seconds[tells]).reshape(-1, len(BLOCK) // 2).sum(axis=1)
            for tells in (True, False)
        )
        # Block by block, because what else runs on the machine changes from minute to minute.
        ratios = (told / untold).tolist()
        low, high = np.quantile(ratios, [0.25, 0.75])
        print(f"{name}: half of the blocks are within {low:.3f} and {high:.3f}", flush=True)
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
