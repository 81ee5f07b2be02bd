"""The steps that a strategy has taken on one worker since a commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparkdl.protocols import Batch
from sparkdl.strategies.base import Run


class StepsAhead:
    """Counts the steps of one worker that trains on while a round is under way.

    Its state is saved when it learns that the round was committed, and is by then some steps ahead.
    So whoever resumes from it must skip the minibatches of those steps.

    Args:
        run: the worker's.

    Attributes:
        steps: since the round began; counted by whoever begins one.
    """

    def __init__(self, run: Run) -> None:
        self.steps = 0
        self._run = run
        self._to_skip = 0

    def saved(self) -> dict[str, Any]:
        """For ``restore``: the steps, and what belongs to the window that they are part of."""
        run = self._run
        window = run.window()
        counted = {"loss_sum": window.loss_sum, "counted": window.counted}
        return {"ahead": self.steps, "examples": run.examples, **counted}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``; ``skip`` must follow before the worker trains."""
        self._to_skip = saved["ahead"]
        self._run.examples, self._run.loss_sum = saved["examples"], saved["loss_sum"]
        self._run.counted = saved.get("counted")

    def skip(self, batches: Iterator[Batch]) -> Batch | None:
        """Count the minibatches already trained on; returns the last, if there are any."""
        batch = None
        for _ in range(self._to_skip):
            batch = next(batches)
            self._run.count_step()
            self._run.replica.schedule.after_step()
        self._to_skip = 0
        return batch
