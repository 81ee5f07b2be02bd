"""What windows add up to, by rank."""

from __future__ import annotations

from collections.abc import Iterable

from sparkdl.events import WindowReport, WindowSums


def sums_of(windows: Iterable[WindowReport]) -> list[WindowSums]:
    """The sums of the ranks that have windows, each rank's in the order of its steps."""
    sums: dict[int, WindowSums] = {}
    for window in windows:
        sums.setdefault(window.rank, WindowSums(rank=window.rank)).add(window)
    return list(sums.values())
