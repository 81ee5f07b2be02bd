"""Bytes of pixels as the floats that a model takes, made when a minibatch is: they are smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch
    from torch import Tensor

LARGEST = {"0..1": 255, "0..255": 1}
"""What bytes are divided by, by the range that they then have."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How bytes become floats, with the operations of torchvision's ToTensor and Normalize.

    Attributes:
        dtype: of the floats.
        range: what 0 to 255 become, a key of ``LARGEST``.
        mean: subtracted then, one number for each channel; empty for nothing.
        std: divided by at last, likewise.
    """

    dtype: torch.dtype
    range: str = "0..1"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def floats(self, pixels: Tensor) -> Tensor:
        """The pixels, computed in float32 at least.

        Args:
            pixels: shape (rows, channels, height, width), uint8.

        Returns:
            The same shape, of ``dtype``, on the same device.
        """
        floats = pixels.double() if self.dtype.itemsize == 8 else pixels.float()
        if LARGEST[self.range] != 1:
            floats.div_(LARGEST[self.range])
        if self.mean:
            mean, std = (floats.new_tensor(each)[:, None, None] for each in (self.mean, self.std))
            floats.sub_(mean).div_(std)
        return floats.to(self.dtype)
