"""Where the patches, blocks and chunks of an array lie, and how large chunks should be.

The patches are laid over the whole array, whatever the chunks: a chunk computes every patch that
reaches into it. So what is predicted does not depend on the chunks, and patches that reach into two
are computed twice.

Sizes and positions are in voxels, by axis, the slowest axis first: (z, y, x) or (y, x).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sparkdl.errors import ConfigError

Sizes = tuple[int, ...]
Bounds = tuple[tuple[int, int], ...]
"""First and last-but-one position by axis."""

BLOCK_VOXELS = {2: 512, 3: 64}
"""Along each axis of a new array's blocks, about; by the number of axes."""
CHUNKS = 4
"""For each slot, so that a slow or lost one costs little."""
SUMMED_NUMBERS = 1 << 24
"""How many numbers of patches beside each other are summed at a time, about."""


def starts_of(size: int, length: int, stride: int) -> Sizes:
    """Where patches begin along an axis; the last is shifted back so that it ends at the edge.

    Args:
        size: of the array.
        length: of a patch; one that is longer than the array begins at 0.
        stride: from one to the next.
    """
    last = max(0, size - length)
    return (*range(0, last, stride), last)


@dataclass(frozen=True)
class Patches:
    """The patches of an array, and what of each is kept.

    Attributes:
        shape: of the array, without channels.
        patch: what the network takes.
        overlap: of two neighbours.
        crop: what is left out on each side of what the network returns.
    """

    shape: Sizes
    patch: Sizes
    overlap: Sizes
    crop: Sizes

    def __post_init__(self) -> None:
        for patch, overlap, crop in zip(self.patch, self.overlap, self.crop, strict=True):
            if not 2 * crop <= overlap < patch:
                raise ConfigError(
                    f"patches of {self.patch} with overlap={self.overlap} and crop={self.crop} "
                    "would leave gaps or never end: along each axis, the overlap must be at least "
                    "twice the crop and less than the patch. The crop is by default what the "
                    "network's output is smaller than its input, on each side"
                )

    @cached_property
    def kept(self) -> Sizes:
        """The size of what is kept of a patch."""
        return tuple(p - 2 * c for p, c in zip(self.patch, self.crop, strict=True))

    @cached_property
    def stride(self) -> Sizes:
        """From one patch to the next."""
        return tuple(p - o for p, o in zip(self.patch, self.overlap, strict=True))

    @cached_property
    def starts(self) -> tuple[Sizes, ...]:
        """Where what is kept begins, by axis."""
        return tuple(map(starts_of, self.shape, self.kept, self.stride))

    def reaching(self, axis: int, bounds: tuple[int, int]) -> range:
        """The numbers of the patches whose kept part reaches into an interval of an axis."""
        starts = self.starts[axis]
        first = bisect_right(starts, bounds[0] - self.kept[axis])
        return range(first, bisect_left(starts, bounds[1]))

    def reads(self, numbers: Sequence[range]) -> Bounds:
        """What the network needs for some patches, by axis; it may go beyond the array."""
        found = []
        for starts, crop, patch, some in zip(
            self.starts, self.crop, self.patch, numbers, strict=True
        ):
            found.append((starts[some[0]] - crop, starts[some[-1]] - crop + patch))
        return tuple(found)


def chunks_of(shape: Sizes, chunk: Sizes) -> list[Bounds]:
    """An array cut into chunks, from its first corner; the last along an axis may be smaller."""
    along = [
        [(start, min(n, start + size)) for start in range(0, n, size)]
        for n, size in zip(shape, chunk, strict=True)
    ]
    return list(itertools.product(*along))


def default_chunk(patches: Patches, outputs: int, slots: float) -> Sizes:
    """A few patches across, and as long along the first axis as leaves ``CHUNKS`` for each slot.

    Args:
        patches: of the array.
        outputs: channels of the output.
        slots: how many chunks are computed at a time.
    """
    depth, *across = patches.patch
    numbers = outputs * math.prod(patches.patch)
    times = max(1, int((SUMMED_NUMBERS / numbers) ** (1 / len(across))))
    wide = [times * each for each in across]
    parts = math.ceil(CHUNKS * slots / len(chunks_of(patches.shape[1:], tuple(wide))))
    return (depth * math.ceil(patches.shape[0] / (depth * parts)), *wide)


def default_blocks(shape: Sizes, patch: Sizes, chunk: Sizes) -> Sizes:
    """The blocks of a new array, which divide its chunks, as near to a cube as they may be.

    Along the first axis they are about a patch long, because finished rows wait in memory for
    a block.
    """
    wanted = BLOCK_VOXELS[len(shape)]

    def block(n: int, size: int, most: int) -> int:
        found = (each for each in range(1, size + 1) if size % each == 0)
        return min(n, min(found, key=lambda each: abs(math.log(each / most))))

    return tuple(map(block, shape, chunk, (min(wanted, patch[0]), wanted, wanted)))


def require_chunk(chunk: Sizes, blocks: Sizes, patches: Patches) -> None:
    """Check a chunk of the user's choice.

    Raises:
        ConfigError: two chunks would write one block, or it is smaller than the overlap.
    """
    for size, block, overlap, n in zip(chunk, blocks, patches.overlap, patches.shape, strict=True):
        if size < min(overlap, n):
            raise ConfigError(
                f"chunk={chunk} is smaller than overlap={patches.overlap}: nearly all patches "
                "would be computed several times. Make it a few patches long along each axis, or "
                "leave chunk='auto'"
            )
        if size % block and size < n:
            raise ConfigError(
                f"chunk={chunk} is no multiple of the output's blocks of {blocks}, so two tasks "
                "would write one block. Choose multiples, or leave chunk='auto'"
            )
