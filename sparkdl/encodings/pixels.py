"""Spark's image structs as bytes in torch's order: channels first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.encodings.encoding import (
    DecodedRows,
    Encoding,
    Shape,
    binary_bytes,
    broken_where,
    has_fields,
    lists_of,
    numpy_of,
)

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch

OPENCV_MODES = {1: 0, 3: 16, 4: 24}
"""The mode of 8-bit images in Spark's image struct, by their number of channels."""
CHANNEL_ORDER = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}
"""Where red, green, blue and alpha are in Spark's image struct, by the number of channels."""
FIELDS = ["origin", "height", "width", "nChannels", "mode", "data"]


class OfPixels(Encoding):
    """Rows that become bytes of shape (channels, height, width)."""

    numeric = False
    of_bytes = True
    dimension_names = ("channels", "height", "width")

    def shape_fault(self, shape: Sequence[int]) -> str | None:
        """A shape needs three dimensions, and a number of channels that images can have."""
        if len(shape) == len(self.dimension_names) and shape[0] in CHANNEL_ORDER:
            return None
        return "the shape of an image is [channels, height, width] with 1, 3 or 4 channels"


class Pixels(OfPixels):
    """Images as Spark reads them."""

    name = "pixels"

    def takes(self, kind: pa.DataType) -> bool:
        """Structs with the fields of Spark's images."""
        return has_fields(kind, FIELDS)

    def decode(self, values: pa.Array, shape: Shape, dtype: torch.dtype) -> DecodedRows:
        """Lists of bytes."""
        fields = dict(zip((field.name for field in values.type), values.flatten(), strict=True))
        channels, height, width = shape
        wanted = {
            "height": height,
            "width": width,
            "nChannels": channels,
            "mode": OPENCV_MODES[channels],
        }
        wrong = np.zeros(len(values), dtype=bool)
        for name, number in wanted.items():
            wrong |= numpy_of(fields[name].fill_null(-1)) != number
        lengths = numpy_of(pc.binary_length(fields["data"]).fill_null(-1))
        wrong |= lengths != channels * height * width
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            found = ", ".join(f"{name} {fields[name][first].as_py()}" for name in wanted)
            reason = f"is an image of {found}, but the declared shape {shape} takes " + ", ".join(
                f"{name} {number}" for name, number in wanted.items()
            )
            kept = values.filter(pa.array(~wrong))
            return self.decode(kept, shape, dtype)[0], broken_where(wrong, reason)
        flat = numpy_of(binary_bytes(fields["data"]))
        pixels = flat.reshape(len(values), height, width, channels)
        return channels_first(pixels[..., CHANNEL_ORDER[channels]]), None


PIXELS = Pixels()


def channels_first(pixels: np.ndarray) -> pa.Array:
    """Images of shape (rows, height, width, channels) as one list of bytes per row."""
    ordered = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return lists_of(ordered.reshape(-1), len(pixels))
