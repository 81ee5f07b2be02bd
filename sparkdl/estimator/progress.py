"""A progress bar in the driver: rows trained, rows a second, epoch and loss."""

from __future__ import annotations

from types import TracebackType

from tqdm.auto import tqdm

from sparkdl.events import EpochSummary, WindowReport


class ProgressBar:
    """Shows a fit's progress; a context manager to be called with every event.

    Args:
        rows: rows of the DataFrame.
        epochs: passes over it.
        visible: whether to show anything.
    """

    def __init__(self, rows: int, epochs: int, *, visible: bool) -> None:
        self._epochs = epochs
        self._loss_sum = 0.0
        self._examples = 0
        self._bar = tqdm(
            total=rows * epochs, unit=" rows", unit_scale=True, disable=not visible, leave=True
        )

    def __enter__(self) -> ProgressBar:
        self._bar.set_description(f"epoch 1/{self._epochs}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def __call__(self, event: WindowReport | EpochSummary) -> None:
        """Take note of a window or an epoch."""
        if isinstance(event, WindowReport):
            self._loss_sum += event.loss_sum
            self._examples += event.examples
            self._bar.set_postfix_str(f"loss {self._mean_loss():.4f}", refresh=False)
            self._bar.update(event.examples)
            return
        self._loss_sum, self._examples = 0.0, 0
        if event.epoch < self._epochs:
            self._bar.set_description(f"epoch {event.epoch + 1}/{self._epochs}")

    def _mean_loss(self) -> float:
        return self._loss_sum / self._examples if self._examples else float("nan")
