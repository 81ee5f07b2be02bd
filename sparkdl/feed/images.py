"""Images, encoded or as Spark reads them, as bytes in torch's order: channels first.

Encoded images may come from anybody. Only the formats that data sets are made of are opened, for in
some of Pillow's others one image contains another, of any size, or runs a program; and no pixel is
decoded of an image that has not the declared size.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.errors import SetupError
from sparkdl.feed.image_headers import Size, announced_sizes
from sparkdl.feed.lists import Broken, binary_bytes, broken_where, lists_of, numpy_of
from sparkdl.protocols import ColumnSpec

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""What is opened, by Pillow's names."""
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""What an image of so many channels is called by Pillow."""
OPENCV_MODES = {1: 0, 3: 16, 4: 24}
"""What Spark's image struct calls 8-bit images of so many channels."""
CHANNEL_ORDER = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}
"""Where red, green, blue and alpha are in Spark's image struct."""


def decode_images(values: pa.Array, spec: ColumnSpec) -> tuple[pa.Array, Broken | None]:
    """Decode BMP, GIF, JPEG, PNG and WebP; of several frames the first.

    Args:
        values: encoded images, no row null.
        spec: its row shape is (channels, height, width).

    Raises:
        SetupError: Pillow is not installed.
    """
    library = _pillow()
    channels, height, width = spec.row_shape
    mode = MODES[channels]
    decoded = np.empty((len(values), height, width, channels), dtype=np.uint8)
    wrong = np.zeros(len(values), dtype=bool)
    reason = ""
    for row, encoded in enumerate(values):
        try:
            with _opened(library, encoded.as_buffer(), (width, height)) as image:
                # Converting copies, also to the mode that it has; and so would numpy.
                pixels = image if image.mode == mode else image.convert(mode)
                octets = np.frombuffer(pixels.tobytes(), np.uint8)
                decoded[row] = octets.reshape(height, width, channels)
        except Exception as error:  # for bytes that are no image Pillow raises almost anything
            reason = reason or f"is no such image: {type(error).__name__}: {error}"
            wrong[row] = True
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


def _opened(library: Any, octets: pa.Buffer, wanted: Size) -> Any:
    """Let Pillow look at an image, and see that it has the size that is wanted.

    Raises:
        ValueError: it has another one, or is of another format; Pillow raises more.
    """
    for size in announced_sizes(memoryview(octets)):
        if size[0] > wanted[0] or size[1] > wanted[1]:
            raise ValueError(_other_size(size, wanted))
    try:
        image = library.open(io.BytesIO(octets), formats=FORMATS)
    except library.UnidentifiedImageError as error:
        raise ValueError(f"it is none of {', '.join(FORMATS)}, or damaged") from error
    if image.size != wanted:
        raise ValueError(_other_size(image.size, wanted))
    return image


def _other_size(found: Size, wanted: Size) -> str:
    return f"it has {found[1]} x {found[0]} pixels, not {wanted[1]} x {wanted[0]}"


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
