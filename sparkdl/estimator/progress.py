"""A progress bar in the driver: rows trained, rows a second, epoch and loss."""

from __future__ import annotations

from types import TracebackType

from tqdm.auto import tqdm

from sparkdl.averager.run_events import RunEvent as Event
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.facts import DataFacts


class ProgressBar:
    """Shows a fit's progress; a context manager to be called with every event.

    Args:
        epochs: passes over it.
        visible: whether to show anything.
    """

    def __init__(self, epochs: int, *, visible: bool) -> None:
        self._epochs = epochs
        self._loss_sum = 0.0
        self._examples = 0
        self._reading = True
        self._bar = tqdm(
            desc="reading rows", unit=" rows", unit_scale=True, disable=not visible, leave=True
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def __call__(self, event: Event) -> None:
        """Take note of the rows there are, of the first or of all, a window or an epoch."""
        if isinstance(event, DataFacts):
            self._note_rows(event)
            return
        if isinstance(event, WindowReport):
            self._loss_sum += event.loss_sum
            self._examples += event.examples
            self._bar.set_postfix_str(f"loss {self._mean_loss():.4f}", refresh=False)
            self._bar.update(event.examples)
            return
        if isinstance(event, EpochSummary):
            self._start_epoch(event.epoch + 1)

    def _note_rows(self, facts: DataFacts) -> None:
        total = facts.rows * self._epochs if facts.complete else None
        if self._reading:
            # Also the moment from which rows a second are counted.
            self._bar.reset(total=total)
            self._bar.set_description_str(f"epoch 1/{self._epochs}")
            self._reading = False
            return
        self._bar.total = total
        self._bar.refresh()

    def _start_epoch(self, epoch: int) -> None:
        self._loss_sum, self._examples = 0.0, 0
        if epoch <= self._epochs:
            self._bar.set_description_str(f"epoch {epoch}/{self._epochs}")

    def _mean_loss(self) -> float:
        return self._loss_sum / self._examples if self._examples else float("nan")
