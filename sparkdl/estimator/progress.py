"""A progress bar in the driver: rows trained, rows per second, epoch, loss, the workers' phase."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

from tqdm import TqdmWarning

from sparkdl.averager.run_events import RunEvent as Event
from sparkdl.averager.run_events import WorkersRestarted, WorkerTimes
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.phases import COMPUTE, DECODE, PHASES
from sparkdl.report.findings import UNEVEN
from sparkdl.user_code.tracebacks import message_of

with warnings.catch_warnings():
    # It warns that ipywidgets is missing; notebooks then show the bar as text, which is fine.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

logger = logging.getLogger(__name__)

DOING = dict(
    zip(PHASES, ("reading", "decoding", "computing", "waiting", "exchanging", "idle"), strict=True)
)
LOOK_S = 0.5
"""Seconds between two looks at what the workers do; a look takes time linear in their number."""
FADING = 0.8
"""How much the observations of one look still count at the next."""


class ProgressBar:
    """Shows a fit's progress; a context manager to be called with every event.

    It is one line, or a widget in notebooks where ipywidgets is installed: rows and rows per second
    by tqdm; the epoch; the mean loss of its rows so far; the phase that the workers have mostly
    been in of late; and who takes longer than the others for its part of the rounds. A fit that
    fails before it trains leaves no line. A bar that cannot be shown, because standard error is
    closed or its reader is gone, is left out with a warning.

    Args:
        epochs: passes over the data.
        visible: whether to show anything.
    """

    def __init__(self, epochs: int, *, visible: bool) -> None:
        self._epochs = epochs
        self._loss_sum = 0.0
        self._divisor = 0.0
        self._reading = True
        self._workers = _Workers()
        self._bar = tqdm(disable=True)
        with self._left_out_if_it_fails():
            self._bar = tqdm(
                desc="reading rows", unit=" rows", unit_scale=True, disable=not visible, leave=True
            )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        with self._left_out_if_it_fails():
            if error is not None and self._reading:
                self._bar.leave = False
            self._bar.close()
            if self._widget is not None and self._bar.leave:
                # tqdm judges by the rows, and a training that was stopped has fewer.
                self._widget.bar_style = "success" if error is None else "danger"

    def __call__(self, event: Event) -> None:
        """Note what has happened."""
        with self._left_out_if_it_fails():
            self._show(event)

    @contextlib.contextmanager
    def _left_out_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a stream, a terminal or a widget may fail in any way
            self._bar.disable = True
            logger.warning(
                "the progress bar is left out, the training goes on: %s", message_of(error)
            )

    def _show(self, event: Event) -> None:
        if isinstance(event, DataStatistics):
            self._note_rows(event)
        elif isinstance(event, WorkerTimes):
            if not self._bar.disable:
                self._workers.note(event)
        elif isinstance(event, WindowReport):
            self._loss_sum += event.loss_sum
            self._divisor += event.divisor
            shown = [f"loss {self._mean_loss():.4f}", *self._workers.told()]
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
            self._bar.update(event.examples)
        elif isinstance(event, EpochSummary):
            self._start_epoch(event.epoch + 1)
        elif isinstance(event, WorkersRestarted):
            self._bar.set_postfix_str("restarting all workers")

    def _note_rows(self, statistics: DataStatistics) -> None:
        # Rows per second are counted from here too.
        self._bar.reset(total=statistics.rows * self._epochs)
        self._bar.set_description_str(f"epoch 1/{self._epochs}")
        self._reading = False

    @property
    def _widget(self) -> Any:
        """The bar itself, without its texts, in a notebook with widgets; None elsewhere."""
        container = getattr(self._bar, "container", None)
        return None if container is None else container.children[1]

    def _start_epoch(self, epoch: int) -> None:
        self._loss_sum, self._divisor = 0.0, 0.0
        if epoch <= self._epochs:
            self._bar.set_description_str(f"epoch {epoch}/{self._epochs}")

    def _mean_loss(self) -> float:
        return self._loss_sum / self._divisor if self._divisor else float("nan")


class _Workers:
    """What the workers have been doing of late."""

    def __init__(self) -> None:
        self._phases = [0.0] * len(PHASES)
        self._busy: dict[int, float] = {}
        self._hosts: dict[int, str] = {}
        self._looked = time.monotonic()
        self._told: list[str] = []

    def note(self, event: WorkerTimes) -> None:
        """Note what one of them has done."""
        seconds = event.times.seconds
        for phase, spent in enumerate(seconds):
            self._phases[phase] += spent
        busy = seconds[DECODE] + seconds[COMPUTE]
        self._busy[event.rank] = self._busy.get(event.rank, 0.0) + busy
        self._hosts[event.rank] = event.host

    def told(self) -> list[str]:
        """Their main phase and who is slow, in words; empty at first."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S and any(self._phases):
            self._looked = now
            self._told = [self._mostly(), *self._slow()]
            self._phases = [FADING * spent for spent in self._phases]
            self._busy = {rank: FADING * spent for rank, spent in self._busy.items()}
        return self._told

    def _mostly(self) -> str:
        phase = max(range(len(PHASES)), key=self._phases.__getitem__)
        share = self._phases[phase] / sum(self._phases)
        return f"{DOING[PHASES[phase]]} {100 * share:.0f} %"

    def _slow(self) -> list[str]:
        mean = sum(self._busy.values()) / len(self._busy)
        rank = max(self._busy, key=self._busy.__getitem__)
        times = self._busy[rank] / mean if mean else 0.0
        if len(self._busy) < 2 or times < UNEVEN:
            return []
        return [f"slow: rank {rank} on {self._hosts[rank][:40]} ({times:.1f} x)"]
