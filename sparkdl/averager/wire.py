"""What travels between workers and the averager: a replica's flat state, cut into chunks.

What each message holds follows from the layout alone: both ends cut every segment into the same
chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparkdl.protocols import Layout

MAX_CHUNK_BYTES = 1 << 20
MIN_CHUNK_BYTES = 64 << 10
HELD_BYTES = 16 << 20
"""What the averager holds, for all workers together, of contributions that wait for their turn."""


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
    """Size of a message: the averager holds one of each worker, whatever their number."""
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, HELD_BYTES // world_size))


def plan_chunks(layout: Layout, size: int) -> list[Chunk]:
    """Cut every segment into chunks of at most ``size`` bytes of its center's dtype."""
    chunks: list[Chunk] = []
    for index, segment in enumerate(layout):
        step = max(1, size // segment.center_dtype.itemsize)
        chunks.extend(
            Chunk(index, start, min(start + step, segment.numel))
            for start in range(0, segment.numel, step)
        )
    return chunks
