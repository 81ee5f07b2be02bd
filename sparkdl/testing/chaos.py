"""A training under random faults, which it has to survive without losing or doubling a row.

The same seed draws the same faults at the same instants after the first round, so that a failure
can be looked at again.
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
from pathlib import Path
from typing import Any

from sparkdl.averager.server import Averager
from sparkdl.checkpoint import storage
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome, run
from sparkdl.errors import TrainingError
from sparkdl.events import WindowReport
from sparkdl.testing.faults import Proxy
from sparkdl.testing.world import Shard, _processes
from sparkdl.worker import Job

WITHIN_BYTES = 20_000
"""A message is cut at one of so many bytes from the instant at which the fault is drawn."""


@dataclass
class Chaos:
    """One run under faults.

    Args:
        job: what to train; its ``max_failures`` has to allow for the faults.
        shards: the rows of each rank.
        seed: draws the faults and their instants.
        faults: how many to inject.
        every_s: seconds between two faults, on average.
        stopped_s: the longest that a process is stopped, in seconds.

    Attributes:
        injected: what was done, in order.
        losses: what the averager saw of it.
    """

    job: Job
    shards: Sequence[Shard]
    seed: int
    faults: int
    every_s: float = 0.4
    stopped_s: float = 3.0
    injected: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def run(self) -> Outcome:
        """Train while faults are injected.

        Raises:
            TrainingError: the run did not survive.
        """
        with tempfile.TemporaryDirectory(prefix="sparkdl-chaos-") as folder:
            training = threading.Event()
            policy = CheckpointPolicy(path=str(Path(folder, "checkpoints")))
            launch = _processes(self.job, self.shards, Path(folder))

            @contextmanager
            def start(averager: Averager) -> Iterator[None]:
                with Proxy(averager.address) as proxy:
                    seen = _SeenThrough(proxy, averager)
                    with launch(seen), self._storm(proxy, training):  # type: ignore[arg-type]
                        yield
                self.losses = averager.losses

            def on_event(event: object) -> None:
                if isinstance(event, WindowReport):
                    training.set()

            return run(self.job, len(self.shards), start, checkpoints=policy, on_event=on_event)

    @contextmanager
    def _storm(self, proxy: Proxy, training: threading.Event) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(
            target=self._inject, args=(proxy, training, over), name="sparkdl-chaos", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(30)

    def _inject(self, proxy: Proxy, training: threading.Event, over: threading.Event) -> None:
        while not training.wait(0.1):
            if over.is_set():
                return
        generator = random.Random(self.seed)
        deeds: list[Callable[[Proxy, random.Random], str]] = [
            self._kill,
            self._stop,
            self._reset,
            self._truncate,
            self._fill_disk,
        ]
        for _ in range(self.faults):
            pause = generator.uniform(0, 2 * self.every_s)
            deed = generator.choice(deeds)
            if over.wait(pause):
                return
            self.injected.append(deed(proxy, generator))

    def _kill(self, proxy: Proxy, generator: random.Random) -> str:
        name, pid = self._pick(generator)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return f"kill {name}"

    def _stop(self, proxy: Proxy, generator: random.Random) -> str:
        name, pid = self._pick(generator)
        seconds = generator.uniform(0.1, self.stopped_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        return f"stop {name} for {seconds:.1f} s"

    def _reset(self, proxy: Proxy, generator: random.Random) -> str:
        return "reset a connection" if proxy.break_one(generator, 0) else "no connection to reset"

    def _truncate(self, proxy: Proxy, generator: random.Random) -> str:
        cut = proxy.break_one(generator, WITHIN_BYTES)
        return "truncate a message" if cut else "no message to truncate"

    def _fill_disk(self, proxy: Proxy, generator: random.Random) -> str:
        write = storage._Checksummed.write

        def full(*_: Any) -> int:
            storage._Checksummed.write = write  # type: ignore[method-assign]
            raise OSError(28, "No space left on device")

        storage._Checksummed.write = full  # type: ignore[method-assign, assignment]
        return "fill the disk"

    @staticmethod
    def _pick(generator: random.Random) -> tuple[str, int]:
        ranks = sorted(multiprocessing.active_children(), key=lambda process: process.name)
        ranks = [process for process in ranks if process.name.startswith("rank ")]
        if not ranks:
            return "nobody", 2**22 + 1
        victim = generator.choice(ranks)
        return victim.name, victim.pid or 2**22 + 1


class _SeenThrough:
    """The averager as workers see it who have to pass the proxy."""

    def __init__(self, proxy: Proxy, averager: Averager) -> None:
        self.address = proxy.address
        self.fail: Callable[[TrainingError], None] = averager.fail
