"""Images, encoded or as Spark reads them, as bytes in torch's order: channels first."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.errors import SetupError
from sparkdl.feed.lists import Broken, binary_bytes, broken_where, lists_of, numpy_of
from sparkdl.protocols import ColumnSpec

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""What an image of so many channels is called by Pillow."""
OPENCV_MODES = {1: 0, 3: 16, 4: 24}
"""What Spark's image struct calls 8-bit images of so many channels."""
CHANNEL_ORDER = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}
"""Where red, green, blue and alpha are in Spark's image struct."""


def decode_images(values: pa.Array, spec: ColumnSpec) -> tuple[pa.Array, Broken | None]:
    """Decode PNG, JPEG and whatever else Pillow reads.

    Args:
        values: encoded images, no row null.
        spec: its row shape is (channels, height, width).

    Raises:
        SetupError: Pillow is not installed.
    """
    library = _pillow()
    channels, height, width = spec.row_shape
    decoded = np.empty((len(values), height, width, channels), dtype=np.uint8)
    wrong = np.zeros(len(values), dtype=bool)
    reason = ""
    for row, encoded in enumerate(values):
        try:
            with library.open(io.BytesIO(encoded.as_buffer())) as image:
                if image.size != (width, height):
                    raise ValueError(
                        f"it has {image.height} x {image.width} pixels, not {height} x {width}"
                    )
                pixels = np.asarray(image.convert(MODES[channels]))
        except (OSError, ValueError, SyntaxError, library.DecompressionBombError) as error:
            # All that Pillow raises for files that it cannot make sense of.
            reason = reason or f"is no such image: {type(error).__name__}: {error}"
            wrong[row] = True
        else:
            decoded[row] = pixels.reshape(height, width, channels)
    return _channels_first(decoded[~wrong] if wrong.any() else decoded), broken_where(wrong, reason)


def decode_pixels(values: pa.Array, spec: ColumnSpec) -> tuple[pa.Array, Broken | None]:
    """Take the pixels out of Spark's image structs.

    Args:
        values: structs (origin, height, width, nChannels, mode, data), no row null.
        spec: its row shape is (channels, height, width).
    """
    fields = dict(zip((field.name for field in values.type), values.flatten(), strict=True))
    channels, height, width = spec.row_shape
    wanted = {
        "height": height,
        "width": width,
        "nChannels": channels,
        "mode": OPENCV_MODES[channels],
    }
    wrong = np.zeros(len(values), dtype=bool)
    for name, number in wanted.items():
        wrong |= numpy_of(fields[name].fill_null(-1)) != number
    lengths = numpy_of(pa.compute.binary_length(fields["data"]).fill_null(-1))
    wrong |= lengths != channels * height * width
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        found = ", ".join(f"{name} {fields[name][first].as_py()}" for name in wanted)
        reason = f"is an image of {found}, the declared shape {spec.row_shape} takes " + ", ".join(
            f"{name} {number}" for name, number in wanted.items()
        )
        kept = values.filter(pa.array(~wrong))
        return decode_pixels(kept, spec)[0], broken_where(wrong, reason)
    flat = numpy_of(binary_bytes(fields["data"]))
    pixels = flat.reshape(len(values), height, width, channels)
    return _channels_first(pixels[..., CHANNEL_ORDER[channels]]), None


def _channels_first(pixels: np.ndarray) -> pa.Array:
    ordered = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return lists_of(ordered.reshape(-1), len(pixels))


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise SetupError(
            "encoded images are decoded with Pillow, which is not installed here: "
            "pip install 'sparkdl-torch[images]'"
        ) from error
    return PIL.Image
