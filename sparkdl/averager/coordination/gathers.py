"""What all workers tell each other by way of the driver, each as often as every other."""

from __future__ import annotations


class Gathers:
    """Values given and not yet complete; one gather after another.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._given: dict[int, object] = {}

    def give(self, rank: int, value: object) -> tuple[object, ...] | None:
        """Take what a rank gives; returns all values, by rank, with the last of them."""
        self._given[rank] = value
        if len(self._given) < self._world_size:
            return None
        given, self._given = self._given, {}
        return tuple(given[other] for other in range(self._world_size))

    def withdraw(self, rank: int) -> None:
        """Forget what a lost rank has given and was not told the others' for: it gives again."""
        self._given.pop(rank, None)

    @property
    def present(self) -> frozenset[int] | None:
        """Who has given to the one that is not complete; None if nobody waits."""
        return frozenset(self._given) if self._given else None
