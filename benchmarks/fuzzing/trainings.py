"""Strangers who call a port while a training runs on it; it must end with the same bits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fuzzing.averager import _secrets
from fuzzing.calling import REFUSALS, Place
from fuzzing.handshake import call
from fuzzing.loop import Fault, Target
from sparkdl.averager.service.server import Averager
from sparkdl.driver import Outcome, run
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import batches_of
from sparkdl.testing.world import _threads
from sparkdl.worker import Job

PATIENCE_S = 60.0
"""Seconds for the next training to begin, and for the last one to end."""


class Trainings(Target):
    """One training after another in a thread; each input is a stranger calling the current one."""

    name = "trainings"
    reads = ("transport/acceptor.py", "transport/handshake.py")

    def __enter__(self) -> Trainings:
        self._folder = self.folder()
        self._alone = self._bits(_train(self._folder, lambda averager: None))
        self._averager: Averager | None = None
        self._changed = threading.Condition()
        self._over = False
        self._wrong: list[str] = []
        self.right = 0
        self._thread = threading.Thread(target=self._train_on, name="trainings", daemon=True)
        self._thread.start()
        self.callback(self._end)
        return self

    def _end(self) -> None:
        self._over = True
        self._thread.join(PATIENCE_S)

    def attempt(self, draw: random.Random) -> bool:
        """One stranger; it may have to wait for the next training."""
        until = time.monotonic() + PATIENCE_S
        while not self._wrong and time.monotonic() < until:
            with self._changed:
                self._changed.wait_for(lambda: self._averager is not None, timeout=1.0)
                averager = self._averager
            if averager is None:
                continue
            try:
                address = averager.address
                place = Place(*address.host_and_port, *_secrets(averager))
                while True:
                    welcome, answer = call(draw, place)
                    if welcome is None:  # a caller with the token may well end the run
                        break
            except OSError:
                continue  # it ended between two checks
            if answer not in REFUSALS:
                raise Fault("a stranger was answered")
            return False
        raise Fault("a training beside strangers went wrong", self._wrong)

    def _train_on(self) -> None:
        while not self._over:
            try:
                bits = self._bits(_train(self._folder, self._show))
            except Exception as error:
                self._wrong.append(repr(error))
                return
            finally:
                self._show(None)
            if not all(torch.equal(a, b) for a, b in zip(bits, self._alone, strict=True)):
                self._wrong.append("other bits than without strangers")
                return
            self.right += 1

    def _show(self, averager: Averager | None) -> None:
        with self._changed:
            self._averager = averager
            self._changed.notify_all()

    @staticmethod
    def _bits(outcome: Outcome) -> list[torch.Tensor]:
        return list(outcome.module.state_dict().values())


def _train(folder: Path, show: Callable[[Averager], None]) -> Outcome:
    generator = np.random.default_rng(0)
    shards = [
        batches_of(
            20,
            features=generator.normal(size=(40, 4)).astype(np.float32),
            label=generator.integers(0, 2, 40),
        )
        for _ in range(2)
    ]
    job = Job(
        model=partial(nn.Linear, 4, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=ParameterAveraging(2),
        schema=FeedSchema(
            (ColumnSpec("features", torch.float32, (4,)),), ColumnSpec("label", torch.int64)
        ),
        epochs=30,
        batch_size=4,
        seed=1,
        deadline_s=60.0,
    )
    start = _threads(job, shards, folder)

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        with start(averager):
            show(averager)
            yield

    return run(job, 2, launch)
