"""How overlapping patches become one array: weights that sum to 1, and a sum that moves along.

The bump exp(-sum over axes of 1 / (1 - u^2)), u from -1 to 1 across a patch, is a product of one
factor per axis, and so is the sum of its copies at the places of all patches. Hence the weights,
which are the bump divided by that sum, are products too: each axis has its own, and no array of
weights is needed.

Source: Wu et al. 2021, "Chunkflow", Nature Methods, https://doi.org/10.1038/s41592-021-01088-5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparkdl.volumes.grid import Bounds, Patches, Sizes

NEGLIGIBLE = 1e-9
"""Smaller weights are 0: they change no float32, but their products would be denormal, and slow."""


def axis_weights(starts: Sequence[int], length: int) -> np.ndarray:
    """The weights of patches along an axis, which sum to 1 wherever there are patches.

    Args:
        starts: where all patches begin that overlap with one that matters, sorted.
        length: of each.

    Returns:
        Shape (patches, length), float64.
    """
    u = 2 * (np.arange(length) + 1) / (length + 1) - 1
    bump, origin = -1 / (1 - u**2), starts[0]  # the bump's logarithm
    places = [slice(start - origin, start - origin + length) for start in starts]
    # Relative to the largest at each position: far from the middle, the bump itself is 0.
    largest = np.full(places[-1].stop, -np.inf)
    for place in places:
        largest[place] = np.maximum(largest[place], bump)
    weights = np.stack([np.exp(bump - largest[place]) for place in places])
    weights[weights < NEGLIGIBLE] = 0
    total = np.zeros_like(largest)
    for place, each in zip(places, weights, strict=True):
        total[place] += each
    return np.stack([each / total[place] for place, each in zip(places, weights, strict=True)])


AxisWeights = tuple[int, Tensor]
"""How many voxels at a patch's beginning have no weight along an axis, and the weights after."""


def weights_within(
    patches: Patches, axis: int, bounds: tuple[int, int], device: str
) -> list[AxisWeights]:
    """The weights of the patches that reach into an interval of an axis.

    Args:
        patches: of the array.
        axis: counted without channels.
        bounds: the interval.
        device: where they are to be.

    Returns:
        Of each patch those above 0, float32; the same whatever the interval.
    """
    numbers = patches.reaching(axis, bounds)
    starts, length = patches.starts[axis], patches.kept[axis]
    around = patches.reaching(axis, (starts[numbers[0]], starts[numbers[-1]] + length))
    weights = axis_weights(starts[around.start : around.stop], length)
    first, found = numbers.start - around.start, []
    for each in weights[first : first + len(numbers)].astype(np.float32):
        # The logarithms of two bumps differ by ever more from one voxel to the next, so that the
        # weights above 0 are neighbors.
        positive = np.flatnonzero(each)
        low, high = (positive[0], positive[-1] + 1) if len(positive) else (0, 0)
        found.append((int(low), torch.from_numpy(each[low:high]).to(device)))
    return found


class MovingSum:
    """The weighted sum of patches over a chunk, of which only a stretch is in memory.

    Patches come in the order of their places along the first axis. Whatever no later patch reaches
    is taken out, and the stretch moves on.

    Args:
        channels: of the output.
        bounds: of the chunk.
        rows: length of the stretch along the first axis.
        device: where to sum.

    Attributes:
        first: the position of the first row that has not been taken out.
    """

    def __init__(self, channels: int, bounds: Bounds, rows: int, device: str) -> None:
        self._bounds = bounds
        self.first = bounds[0][0]
        extents = [upper - lower for lower, upper in bounds[1:]]
        self._sums = torch.zeros(channels, rows, *extents, device=device)

    def add(self, values: Tensor, start: Sizes, weights: Sequence[AxisWeights]) -> None:
        """Add a patch.

        Args:
            values: shape (channels, ...), float32; what is outside of the chunk is left out, and so
                is what has no weight: it may be infinite.
            start: where it begins.
            weights: along each axis.
        """
        bounds = ((self.first, self._bounds[0][1]), *self._bounds[1:])
        inside, here, product = [slice(None)], [slice(None)], torch.ones((), device=values.device)
        for (lower, upper), begin, (skipped, own) in zip(bounds, start, weights, strict=True):
            first = begin + skipped
            low, high = max(lower, first), min(upper, first + len(own))
            if low >= high:
                return
            inside.append(slice(low - begin, high - begin))
            here.append(slice(low - lower, high - lower))
            product = product[..., None] * own[low - first : high - first]
        self._sums[tuple(here)].addcmul_(values[tuple(inside)], product)

    def take(self, upto: int) -> Tensor:
        """The rows before a position, shape (channels, rows, ...); they are taken out."""
        rows = upto - self.first
        taken = self._sums[:, :rows].clone()
        left = self._sums.shape[1] - rows
        for row in range(left):  # each by itself, because the two places overlap
            self._sums[:, row] = self._sums[:, row + rows]
        self._sums[:, left:] = 0
        self.first = upto
        return taken
