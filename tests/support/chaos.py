"""A training under random faults, which it has to survive without losing or duplicating a row.

The same seed draws the same faults at the same instants after the first round, so that a failure
can be reproduced.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from support.faults import Proxy

from sparkdl.averager.service.server import Averager
from sparkdl.checkpoint import storage
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Launch, Observers, Outcome, RunOptions, run
from sparkdl.events import WindowReport
from sparkdl.testing import Shard, _processes
from sparkdl.worker import Job

WITHIN_BYTES = 20_000
"""A message is cut within this many bytes of the instant at which the fault is drawn."""

Victims = Callable[[], Sequence[tuple[str, int]]]
"""The processes that may be killed or stopped at this moment: names and process IDs."""

Deed = Callable[[random.Random], str]
"""Injects a fault of its own choosing; returns what was done."""


@dataclass
class Storm:
    """Random faults, from the first round of a training to its end.

    Args:
        seed: draws the faults and their instants.
        faults: how many to inject.
        victims: whose processes are killed and stopped.
        every_s: seconds between two faults, on average.
        stopped_s: the longest that a process is stopped, in seconds.
        host: the address of this machine at which workers reach the faulty connections.
        more: faults besides those of processes, connections and the disk.

    Attributes:
        injected: what was done, in order.
        losses: the losses that the averager noticed.
    """

    seed: int
    faults: int
    victims: Victims
    every_s: float = 0.4
    stopped_s: float = 3.0
    host: str = "127.0.0.1"
    more: Sequence[Deed] = ()
    injected: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._generator = random.Random(self.seed)
        self._training = threading.Event()

    @property
    def hits(self) -> int:
        """How many of the faults had something to hit."""
        return sum("no" not in fault.split() and "nobody" not in fault for fault in self.injected)

    def over(self, launch: Launch) -> Launch:
        """Start workers as ``launch`` does, but with faulty connections to the averager."""

        @contextmanager
        def start(averager: Averager) -> Iterator[None]:
            with Proxy(averager.address, host=self.host) as proxy:
                seen = _SeenThrough(proxy, averager)
                try:
                    with launch(seen), self._blowing(proxy):  # type: ignore[arg-type]
                        yield
                finally:
                    self.losses += averager.losses

        return start

    def on_event(self, event: object) -> None:
        """Take note of what the workers report: faults begin with the first round."""
        if isinstance(event, WindowReport):
            self._training.set()

    @contextmanager
    def _blowing(self, proxy: Proxy) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(
            target=self._inject, args=(proxy, ended), name="sparkdl-chaos", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(120)

    def _inject(self, proxy: Proxy, ended: threading.Event) -> None:
        while not self._training.wait(0.1):
            if ended.is_set():
                return
        own = [self._kill, self._stop, self._reset, self._truncate, self._fill_disk]
        deeds = [partial(deed, proxy) for deed in own]
        deeds += [partial(deed, self._generator) for deed in self.more]
        while len(self.injected) < self.faults:
            pause = self._generator.uniform(0, 2 * self.every_s)
            deed = self._generator.choice(deeds)
            if ended.wait(pause):
                return
            self.injected.append(deed())

    def _kill(self, proxy: Proxy) -> str:
        name, pid = self._pick()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return f"kill {name}"

    def _stop(self, proxy: Proxy) -> str:
        name, pid = self._pick()
        seconds = self._generator.uniform(0.1, self.stopped_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        return f"stop {name} for {seconds:.1f} s"

    def _reset(self, proxy: Proxy) -> str:
        broke = proxy.break_one(self._generator, 0)
        return "reset a connection" if broke else "no connection to reset"

    def _truncate(self, proxy: Proxy) -> str:
        cut = proxy.break_one(self._generator, WITHIN_BYTES)
        return "truncate a message" if cut else "no message to truncate"

    def _fill_disk(self, proxy: Proxy) -> str:
        write = storage._Hashed.write

        def full(*_: Any) -> int:
            storage._Hashed.write = write  # type: ignore[method-assign]
            raise OSError(28, "No space left on device")

        storage._Hashed.write = full  # type: ignore[method-assign, assignment]
        return "fill the disk"

    def _pick(self) -> tuple[str, int]:
        victims = sorted(self.victims())
        return self._generator.choice(victims) if victims else ("nobody", 2**22 + 1)


@dataclass
class Chaos:
    """One run under faults, every rank a process on this machine.

    Args:
        job: what to train; its ``max_failures`` has to allow for the faults.
        shards: the rows of each rank.
        seed: draws the faults and their instants.
        faults: how many to inject.
        every_s: seconds between two faults, on average.

    Attributes:
        storm: the faults.
    """

    job: Job
    shards: Sequence[Shard]
    seed: int
    faults: int
    every_s: float = 0.4

    def __post_init__(self) -> None:
        self.storm = Storm(self.seed, self.faults, _ranks, self.every_s)

    def run(self) -> Outcome:
        """Train while faults are injected.

        Raises:
            TrainingError: the run did not survive.
        """
        with tempfile.TemporaryDirectory(prefix="sparkdl-chaos-") as folder:
            return run(
                self.job,
                len(self.shards),
                self.storm.over(_processes(self.job, self.shards, Path(folder))),
                RunOptions(checkpoints=CheckpointPolicy(path=str(Path(folder, "checkpoints")))),
                Observers(on_event=self.storm.on_event),
            )


def _ranks() -> list[tuple[str, int]]:
    """The processes that train."""
    processes = multiprocessing.active_children()
    return [(p.name, p.pid or 0) for p in processes if p.pid and p.name.startswith("rank ")]


class _SeenThrough:
    """The averager as seen by workers that connect through the proxy."""

    def __init__(self, proxy: Proxy, averager: Averager) -> None:
        self.address = proxy.address
        self._averager = averager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._averager, name)
