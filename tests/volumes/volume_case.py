"""Small volumes, and models of them."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparkdl.volumes.chunk import Recipe, predict_chunk
from sparkdl.volumes.grid import Bounds, Patches, Sizes, chunks_of


def bump(sizes: Sizes) -> np.ndarray:
    """exp(-sum over axes of 1 / (1 - u^2)), as Chunkflow has it."""
    exponent = np.zeros(sizes)
    for axis, n in enumerate(sizes):
        u = 2 * (np.arange(n) + 1) / (n + 1) - 1
        along = [1] * len(sizes)
        along[axis] = n
        exponent += (1 / (1 - u**2)).reshape(along)
    return np.exp(-exponent)


def sliding_window(
    array: np.ndarray, patches: Patches, function: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Every patch of the whole array, added up with its bump, and divided by the sum of bumps.

    Args:
        array: shape (channels, *sizes).
        patches: sizes.
        function: from (channels, *patch) to (outputs, *kept).
    """
    shape = array.shape[1:]
    kept = [p - 2 * c for p, c in zip(patches.patch, patches.crop, strict=True)]
    beyond = [(c, c + max(0, k - n)) for c, k, n in zip(patches.crop, kept, shape, strict=True)]
    padded = np.pad(array.astype(np.float64), [(0, 0), *beyond], mode="reflect")
    starts = []
    for n, k, p, o in zip(shape, kept, patches.patch, patches.overlap, strict=True):
        found, at = [0], 0
        while at + k < n:
            at = min(at + p - o, n - k)
            found.append(at)
        starts.append(found)
    extents = [max(n, k) for n, k in zip(shape, kept, strict=True)]
    mask, masks = bump(tuple(kept)), np.zeros(extents)
    sums: Any = 0
    for start in itertools.product(*starts):
        place = tuple(slice(s, s + k) for s, k in zip(start, kept, strict=True))
        given = tuple(slice(s, s + p) for s, p in zip(start, patches.patch, strict=True))
        outputs = function(padded[(slice(None), *given)])
        if isinstance(sums, int):
            sums = np.zeros((len(outputs), *extents))
        sums[(slice(None), *place)] += mask * outputs
        masks[place] += mask
    inside = tuple(slice(0, n) for n in shape)
    return (sums / masks)[(slice(None), *inside)]


class InMemory:
    """An array that is read and written at once; no voxel may be written twice."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.writes = np.zeros(values.shape, int)
        self.largest = 0

    def read(self, bounds: Bounds) -> np.ndarray:
        assert all(0 <= lower < upper for lower, upper in bounds)
        part: np.ndarray = self.values[(slice(None), *(slice(*each) for each in bounds))]
        assert part.shape[1:] == tuple(upper - lower for lower, upper in bounds)
        return part.copy()

    def write(self, bounds: Bounds, values: Tensor) -> None:
        place = (slice(None), *(slice(*each) for each in bounds))
        self.values[place] = values.numpy()
        self.writes[place] += 1
        self.largest = max(self.largest, values.shape[1])


def middle(patches: Patches) -> tuple[slice, ...]:
    """What is kept of a patch."""
    return tuple(slice(c, p - c) for c, p in zip(patches.crop, patches.patch, strict=True))


def predict(
    array: np.ndarray,
    patches: Patches,
    chunk: Sizes,
    blocks: Sizes,
    network: Callable[[np.ndarray], Tensor] | None = None,
    *,
    outputs: int | None = None,
    **changes: Any,
) -> np.ndarray:
    """All chunks of an array, in memory; by default of the identity."""
    found = InMemory(np.full((outputs or len(array), *array.shape[1:]), np.nan, np.float32))
    usual = {"outputs": outputs or len(array), "batch": 3, "labels": False, "skip_zeros": True}
    recipe = Recipe(patches=patches, blocks=blocks, **{**usual, **changes})
    cut = (slice(None), slice(None), *middle(patches))
    identity = lambda given: torch.from_numpy(given[cut]).float()  # noqa: E731
    read, write = InMemory(array).read, found.write
    for bounds in chunks_of(array.shape[1:], chunk):
        predict_chunk(recipe, bounds, read, write, network or identity, "cpu")
    written = found.writes[:1] if recipe.labels else found.writes
    assert (written == 1).all()
    return found.values


class Edges(nn.Module):
    """Three channels, which depend on the neighbours of a voxel."""

    def __init__(self, channels: int = 1, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(
            nn.Conv3d(channels, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, outputs, 3, padding=1)
        )

    def forward(self, patch: Tensor) -> Tensor:
        return self.net(patch)


class Named(nn.Module):
    """Takes a dict, and returns several outputs; one of them is smaller than its input."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        values = features["raw"]
        return {"same": values, "inner": values[:, :, 2:-2, 3:-3] * 2}


class Fails(nn.Module):
    """Fails on a patch with a certain voxel."""

    def forward(self, patch: Tensor) -> Tensor:
        if (patch == 255).any():
            raise ZeroDivisionError("the user's own mistake")
        return patch


class Shape(nn.Module):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, patch: Tensor) -> Any:
        return self.change(patch)


class Dies(Edges):
    """Kills its process in some of all forward passes, once each.

    Args:
        folder: an empty one, in which passes are counted.
        passes: the numbers of those passes.
    """

    def __init__(self, folder: Path, passes: Collection[int]) -> None:
        super().__init__()
        self.folder, self.passes = str(folder), sorted(passes)

    def forward(self, patch: Tensor) -> Tensor:
        for number in range(len(os.listdir(self.folder)), 100_000):
            try:
                os.close(os.open(f"{self.folder}/{number:06d}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue  # another process has just begun this one
            break
        if number in self.passes:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(patch)
