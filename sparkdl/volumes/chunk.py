"""One chunk: read, patch by patch through the network, blended, reduced, written.

for the patches of each place along the first axis:
    read what they need, while those before them are computed
    those that hold only zeros are 0; the others go through the network
    add them, weighted, to the sum
    write the blocks that no later patch reaches
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sparkdl.errors import ModelError
from sparkdl.volumes.blend import MovingSum, weights_within
from sparkdl.volumes.grid import Bounds, Patches, Sizes

Read = Callable[[Bounds], np.ndarray]
"""From a part of an array to what it holds, shape (channels, *sizes)."""
Write = Callable[[Bounds, Tensor], None]
"""Writes whole blocks, shape (channels, *sizes); they are durable when it returns."""
Network = Callable[[np.ndarray], Tensor]
"""From patches, shape (n, channels, *patch), to shape (n, outputs, *kept), float32."""


@dataclass(frozen=True)
class Recipe:
    """How chunks are predicted; sent to the executors.

    Attributes:
        patches: of the array.
        blocks: of the output.
        outputs: channels of the network's output.
        batch: the most patches that go through the network at once.
        labels: whether the index of the largest channel is written in place of the channels.
        skip_zeros: whether a patch that holds only zeros is 0 without the network.
    """

    patches: Patches
    blocks: Sizes
    outputs: int
    batch: int
    labels: bool
    skip_zeros: bool


def predict_chunk(
    recipe: Recipe, bounds: Bounds, read: Read, write: Write, network: Network, device: str
) -> int:
    """Predict one chunk; returns how many patches went through the network.

    Args:
        recipe: how.
        bounds: of the chunk.
        read: reads the input.
        write: writes the output, all of it once this returns.
        network: computes patches.
        device: where it leaves them.
    """
    patches, upper = recipe.patches, bounds[0][1]
    numbers, layers = _layers(patches, bounds)
    weights = [weights_within(patches, axis, each, device) for axis, each in enumerate(bounds)]
    block = recipe.blocks[0]
    summed = min(upper - bounds[0][0], patches.kept[0] + block)
    sums = MovingSum(recipe.outputs, bounds, summed, device)
    rows = -(-patches.stride[0] // block) * block  # are written at a time
    computed = 0
    written: Future[None] | None = None
    with ThreadPoolExecutor(2) as pool:  # one reads, one writes
        coming = pool.submit(mirrored, read, patches.shape, patches.reads(layers[0]))
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            given = coming.result()
            if following is not None:
                coming = pool.submit(mirrored, read, patches.shape, patches.reads(following))
            for place, values in _outputs(recipe, given, layer, network):
                start = tuple(starts[n] for starts, n in zip(patches.starts, place, strict=True))
                own = [w[n - all_[0]] for w, n, all_ in zip(weights, place, numbers, strict=True)]
                sums.add(values, start, own)
                computed += 1
            ready = upper
            if following is not None:
                start_of_next = patches.starts[0][following[0][0]]
                ready = start_of_next - start_of_next % block
            while sums.first < ready:
                if written is not None:
                    written.result()  # before the next rows take as much memory
                upto = min(ready, sums.first + rows)
                part = ((sums.first, upto), *bounds[1:])
                written = pool.submit(write, part, _taken(recipe, sums, part))
    if written is not None:
        written.result()
    return computed


def read_chunk(patches: Patches, bounds: Bounds, read: Read) -> None:
    """Read what a chunk is predicted from, in the same parts and order."""
    for layer in _layers(patches, bounds)[1]:
        read(_inside(patches.shape, patches.reads(layer)))


def _layers(patches: Patches, bounds: Bounds) -> tuple[list[range], list[tuple[range, ...]]]:
    """The numbers of the patches that reach into a chunk, all and by place along the first axis."""
    numbers = [patches.reaching(axis, each) for axis, each in enumerate(bounds)]
    return numbers, [(range(layer, layer + 1), *numbers[1:]) for layer in numbers[0]]


def _taken(recipe: Recipe, sums: MovingSum, part: Bounds) -> Tensor:
    """What is to be written of a part, whose rows are next.

    Raises:
        ModelError: of NaN and other numbers, none is the largest.
    """
    values = sums.take(part[0][1])
    if not recipe.labels:
        return values.cpu()
    if (unknown := values.amax(0).isnan()).any():
        voxel = [int(each) for each in unknown.nonzero()[0]]
        place = tuple(low + each for (low, _), each in zip(part, voxel, strict=True))
        raise ModelError(
            f"the model returns NaN in voxel {place}, so that reduce='argmax' cannot say which "
            "channel is the largest. Fill NaN in the input first, or have the model replace it in "
            "its scores with torch.nan_to_num"
        )
    return values.argmax(0, keepdim=True).cpu()


def mirrored(read: Read, shape: Sizes, wanted: Bounds) -> np.ndarray:
    """Read a part of an array; what is beyond its edges mirrors what is inside.

    Args:
        read: reads the array.
        shape: its shape, without channels.
        wanted: the part.

    Returns:
        Shape (channels, *sizes).
    """
    inside = _inside(shape, wanted)
    beyond = [
        (there[0] - asked[0], asked[1] - there[1])
        for asked, there in zip(wanted, inside, strict=True)
    ]
    values = read(inside)
    return np.pad(values, [(0, 0), *beyond], mode="reflect") if np.any(beyond) else values


def _inside(shape: Sizes, wanted: Bounds) -> Bounds:
    """What of a part is inside of an array."""
    return tuple(
        (max(0, lower), min(size, upper))
        for (lower, upper), size in zip(wanted, shape, strict=True)
    )


def _outputs(
    recipe: Recipe, given: np.ndarray, layer: Sequence[range], network: Network
) -> Iterator[tuple[Sizes, Tensor]]:
    """What the network makes of each patch that is not skipped, in order.

    Args:
        recipe: how.
        given: what the patches need, shape (channels, *sizes).
        layer: the numbers of the patches along each axis.
        network: computes patches.
    """
    patches = recipe.patches
    waiting: list[tuple[Sizes, np.ndarray]] = []
    along = [
        {n: slice(starts[n] - starts[some[0]], starts[n] - starts[some[0]] + length) for n in some}
        for starts, some, length in zip(patches.starts, layer, patches.patch, strict=True)
    ]
    for place in itertools.product(*layer):
        cut = (slice(None), *(slices[n] for slices, n in zip(along, place, strict=True)))
        values = given[cut]
        if not recipe.skip_zeros or values.any():
            waiting.append((place, values))
    # In equal parts: torch computes a last patch that is alone several times as slowly.
    parts = -(-len(waiting) // recipe.batch)
    for number in range(parts):
        some = waiting[number * len(waiting) // parts : (number + 1) * len(waiting) // parts]
        outputs = network(np.stack([each for _, each in some]))
        yield from zip((each for each, _ in some), outputs, strict=True)
