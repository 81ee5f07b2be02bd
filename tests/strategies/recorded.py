"""What a run decides, for tests that do the same by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator


@contextmanager
def recorded_decisions() -> Iterator[list[do.Decision]]:
    """Take down what the runs of this process decide meanwhile."""
    decided: list[do.Decision] = []
    handle = Coordinator.handle

    def recording(self: Coordinator, event: on.Event, now: float) -> list[do.Decision]:
        decisions = handle(self, event, now)
        decided.extend(decisions)
        return decisions

    Coordinator.handle = recording  # type: ignore[method-assign]
    try:
        yield decided
    finally:
        Coordinator.handle = handle  # type: ignore[method-assign]
