"""Where the patches, blocks and chunks of an array lie, and how large chunks should be.

The patches are laid over the whole array, whatever the chunks: a chunk computes every patch that
reaches into it. So what is predicted does not depend on the chunks, and patches that reach into two
are computed twice; ``chosen_chunk`` weighs that.

Sizes and positions are in voxels, by axis, the slowest axis first: (z, y, x) or (y, x).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from sparkdl.errors import ConfigError

Sizes = tuple[int, ...]
Bounds = tuple[tuple[int, int], ...]
"""First and last-but-one position by axis."""

BLOCK_VOXELS = {2: 512, 3: 64}
"""Along each axis of a new array's blocks, about; by the number of axes."""
CANDIDATES = 32
"""The most lengths of a chunk along an axis that are compared."""
LAST_CHUNK = 0.25
"""How much of a chunk's time counts besides the waves: what a lost worker or a late one costs."""


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


@dataclass(frozen=True)
class Chunks:
    """An array cut into chunks, from its first corner; the last along an axis may be smaller."""

    shape: Sizes
    chunk: Sizes

    @cached_property
    def counts(self) -> Sizes:
        """Chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def __getitem__(self, number: int) -> Bounds:
        """The bounds of a chunk; numbers run along the last axis first."""
        places = []
        for count in reversed(self.counts):
            number, place = divmod(number, count)
            places.append(place)
        return tuple(
            (place * c, min(n, (place + 1) * c))
            for place, c, n in zip(reversed(places), self.chunk, self.shape, strict=True)
        )


def default_blocks(shape: Sizes, stride: Sizes, chunk: Sizes | None) -> Sizes:
    """The blocks of a new array, as near to a cube as they may be.

    They divide the chunk, if that is known. If not, they divide the stride, or are multiples of it;
    but along the first axis they are no longer, because finished rows wait in memory for a block.

    Args:
        shape: of the array.
        stride: of the patches.
        chunk: None if one is to be chosen.
    """
    wanted = BLOCK_VOXELS[len(shape)]

    def block(axis: int, n: int, unit: int) -> int:
        sizes = [d for d in range(1, min(unit, 4 * wanted) + 1) if unit % d == 0] + [unit]
        if axis and chunk is None:
            sizes.append(unit * max(1, wanted // unit))
        return min(n, min(sizes, key=lambda size: abs(math.log(size / wanted))))

    return tuple(map(block, range(len(shape)), shape, chunk or stride))


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


def summed_rows(patches: Patches, blocks: Sizes, rows: int) -> int:
    """How many of a chunk's rows are summed at a time: those of a patch and a block."""
    return min(rows, patches.kept[0] + blocks[0])


def written_rows(patches: Patches, blocks: Sizes) -> int:
    """How many rows are written at a time: whole blocks, no fewer than a stride."""
    return -(-patches.stride[0] // blocks[0]) * blocks[0]


def chunk_bytes(
    patches: Patches,
    blocks: Sizes,
    chunk: Sizes,
    *,
    read_bytes: int,
    read_blocks: Sizes,
    outputs: int,
) -> int:
    """The memory that a chunk takes besides the network, in bytes.

    The sums move along the first axis, so that its length does not matter. What is written is in
    memory three times: as it was taken, as blocks, and compressed. What is read is there for two
    places along that axis, and once more for one layer of the input's blocks, which are
    decompressed as a whole, all of them before the first is copied.

    Args:
        patches: of the array.
        blocks: of the output.
        chunk: its size.
        read_bytes: of a voxel's channels in the input.
        read_blocks: of the input.
        outputs: channels of the output.
    """
    inside = [min(n, c) for n, c in zip(patches.shape, chunk, strict=True)]
    rows = summed_rows(patches, blocks, inside[0])
    rows += 3 * min(inside[0], written_rows(patches, blocks))
    margin = [n + 2 * p for n, p in zip(inside[1:], patches.patch[1:], strict=True)]
    whole = [
        min(-(-n // b), (m + b - 2) // b + 1) * b
        for n, m, b in zip(patches.shape[1:], margin, read_blocks[1:], strict=True)
    ]
    layer = min(patches.patch[0], read_blocks[0])
    copies = 3 if any(patches.crop) else 2  # what is mirrored at the edges is copied
    read = (copies * patches.patch[0] + layer) * math.prod(margin)
    read += read_blocks[0] * math.prod(whole)
    return 4 * outputs * rows * math.prod(inside[1:]) + read_bytes * read


def chosen_chunk(
    patches: Patches,
    blocks: Sizes,
    slots: float,
    budget: int,
    memory: Callable[[Sizes], int],
    *,
    must_fit: bool = True,
) -> Sizes:
    """The chunk with which all patches are done first, of those that fit into the memory.

    Small ones share the work evenly and lose little to a lost worker; large ones compute fewer
    patches twice.

    Args:
        patches: of the array.
        blocks: of the output, of which it is a multiple.
        slots: how many chunks are computed at a time.
        budget: the most bytes that a chunk may take.
        memory: what a chunk takes.
        must_fit: whether the smallest is refused too if it takes more.

    Raises:
        ConfigError: not even one block fits.
    """
    options = [_options(patches, axis, block) for axis, block in enumerate(blocks)]
    best: tuple[float, Sizes] | None = None
    for option in itertools.product(*options):
        chunk = tuple(each[0] for each in option)
        largest = math.prod(each[1] for each in option)
        waves = math.ceil(math.prod(each[2] for each in option) / slots)
        time = (waves + LAST_CHUNK) * largest
        if (best is None or time < best[0]) and memory(chunk) <= budget:
            best = time, chunk
    if best is None:
        least = tuple(each[0][0] for each in options)
        if not must_fit:
            return least
        raise ConfigError(
            f"a chunk of {least}, the smallest of whole blocks of the output, takes "
            f"{memory(least) / 2**20:.0f} MiB, and of the memory that a task may take, "
            f"{max(0, budget) / 2**20:.0f} are left for it besides Python and the network. Raise "
            "spark.executor.pyspark.memory or spark.executor.memoryOverhead, or take a smaller "
            "patch, or set chunk, which is then taken as it is"
        )
    return best[1]


def _options(patches: Patches, axis: int, block: int) -> list[tuple[int, int, int]]:
    """Lengths of a chunk along an axis, with the most patches in one, and the number of chunks."""
    size = patches.shape[axis]
    whole = -(-size // block)
    step = max(1.0, whole ** (1 / (CANDIDATES - 1)))
    found = []
    multiples = {min(whole, math.ceil(step**k)) for k in range(CANDIDATES)} | {whole}
    if whole <= CANDIDATES:
        multiples = set(range(1, whole + 1))
    least = min(patches.overlap[axis], size)
    for blocks in sorted(multiples):
        length = blocks * block
        if length < least and blocks < whole:
            continue
        cuts = [(start, min(size, start + length)) for start in range(0, size, length)]
        most = max(len(patches.reaching(axis, cut)) for cut in cuts)
        found.append((length, most, len(cuts)))
    return found
