"""A strategy on one worker, from when it is sent the center until it leaves the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Generic

from sparkdl.strategies.base import Run, State, Strategy


class OnWorker(Generic[State]):
    """A strategy's state while the worker trains, and what was saved of it before.

    Args:
        strategy: the one that has the state.

    Attributes:
        restored: the saved part of the state that the worker resumes with; empty for none.
    """

    def __init__(self, strategy: Strategy[State]) -> None:
        self.restored: Mapping[str, Any] = {}
        self._strategy = strategy
        self._state: State | None = None

    @contextmanager
    def started(self, run: Run) -> Iterator[State]:
        """Start the strategy, and clean up after it, even if it could not start."""
        with ExitStack() as run.cleanup:
            state = self._strategy.start(run)
            if self.restored:
                self._strategy.restore_state(state, self.restored)
            self._state = state
            try:
                yield state
            finally:
                self._state = None

    def saved_state(self) -> Mapping[str, Any]:
        """The part of the state to save; empty while there is no state."""
        return {} if self._state is None else self._strategy.saved_state(self._state)
