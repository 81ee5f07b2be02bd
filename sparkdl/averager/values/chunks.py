"""What travels between workers and the averager: a replica's flat state, cut into chunks.

The layout alone determines what each message holds: both ends cut every segment into the same
chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparkdl.protocols import Layout

MAX_CHUNK_BYTES = 1 << 20
MIN_CHUNK_BYTES = 64 << 10
HELD_BYTES = 64 << 20
"""How much of contributions waiting for their turn the averager holds, for all workers together."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message's worth of a segment: elements ``start`` to ``stop``."""

    segment: int
    start: int
    stop: int

    def of(self, segments: list[Tensor]) -> Tensor:
        """The chunk's elements, a view."""
        return segments[self.segment][self.start : self.stop]


def chunk_bytes(world_size: int) -> int:
    """Size of a message, such that the averager can hold one from every worker."""
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, HELD_BYTES // world_size))


def plan_chunks(layout: Layout, size: int) -> list[Chunk]:
    """Cut every segment into chunks of at most ``size`` bytes in its center's dtype."""
    (chunks,) = plan_fragments(layout, size, 1)
    return chunks


def plan_fragments(layout: Layout, size: int, fragments: int) -> list[list[Chunk]]:
    """Cut the state into fragments, and these into chunks.

    Args:
        layout: kinds and sizes of the segments.
        size: the most bytes that a chunk may have in its center's dtype.
        fragments: how many; each has an equal stretch of every segment.
    """
    return [
        [
            Chunk(index, start, min(start + step, stop))
            for index, segment in enumerate(layout)
            for step in [max(1, size // segment.center_dtype.itemsize)]
            for stop in [segment.numel * (fragment + 1) // fragments]
            for start in range(segment.numel * fragment // fragments, stop, step)
        ]
        for fragment in range(fragments)
    ]
