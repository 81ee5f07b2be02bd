"""The numbers of an array where they change their type, and a digest of those that were read."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from sparkdl.errors import DataError
from sparkdl.feed.conversion import first_lost
from sparkdl.volumes.chunk import Source
from sparkdl.volumes.grid import Bounds


def require_held(
    values: np.ndarray, dtype: torch.dtype, bounds: Bounds, whose: str, remedy: str
) -> None:
    """Check that a dtype holds all numbers of a part of an array.

    Args:
        values: shape (channels, *sizes).
        dtype: what they are to become.
        bounds: where the part is.
        whose: what holds them, as the beginning of a sentence.
        remedy: what to do about it.

    Raises:
        DataError: it does not; the message names the first number and its place.
    """
    lost = first_lost(values, dtype)
    if lost is None:
        return
    channel, *inside = (int(each) for each in np.unravel_index(lost, values.shape))
    voxel = tuple(low + each for (low, _), each in zip(bounds, inside, strict=True))
    name = str(dtype).removeprefix("torch.")
    raise DataError(
        f"{whose} holds {values.flat[lost]} ({values.dtype}) in voxel {voxel} of channel "
        f"{channel}, which {name} cannot hold. {remedy}"
    )


class Reading:
    """What is read of an input for one chunk, in the order in which it is read.

    Args:
        source: the input.
        url: where it is, for messages.
        dtype: that of the model's patches.
    """

    def __init__(self, source: Source, url: str, dtype: torch.dtype) -> None:
        self._source, self._url, self._dtype = source, url, dtype
        self._hash = hashlib.blake2b(digest_size=16)

    def read(self, bounds: Bounds) -> np.ndarray:
        """Read, shape (channels, *sizes).

        Raises:
            DataError: it cannot be read, or holds a number that the dtype cannot hold.
        """
        values = self._source.read(bounds)
        require_held(
            values,
            self._dtype,
            bounds,
            self._url,
            "Scale the array first, or make the model with an example of a wider dtype",
        )
        self._hash.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        return values

    @property
    def digest(self) -> str:
        """The digest of all that has been read."""
        return self._hash.hexdigest()
