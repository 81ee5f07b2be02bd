"""Images of any size, turned as their EXIF says and brought to the declared size.

    open (JPEG: draft) -> the declared channels, on white -> exif_transpose -> fit, pad or resize

Each step is Pillow's own, with its own defaults (bicubic), so that plain Pillow gives the same
bytes. A JPEG much larger than the declared size is decoded at an eighth, a quarter or half of its
size, at least twice the declared one, as ``Image.thumbnail`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.encodings.encoding import Encoding
from sparkdl.encodings.images import Ground, Pictures, Size, converted, opened, white
from sparkdl.encodings.numbers import RawBytes
from sparkdl.encodings.pixels import CHANNEL_ORDER, OPENCV_MODES, Pixels

PIXELS = {False: 2**25, True: 2**26}
"""The most pixels that an image may announce, and a JPEG: cameras make those of 48 million."""
REDUCING_GAP = 2
"""A JPEG is decoded at no less than so many times the declared size; see ``Image.thumbnail``."""
_JPEG = b"\xff\xd8"
_ORIENTATION = 0x0112
_TRANSPOSED = frozenset({5, 6, 7, 8})
"""The orientations in which width and height change places."""


class AnySize(Pictures):
    """Encoded images and Spark's image structs, brought to the declared size.

    Args:
        fit: a key of ``FITTED``.
    """

    def __init__(self, fit: str) -> None:
        self.name, self._fit = f"image {fit}", fit

    def reads(self, other: Encoding) -> bool:
        """Binary rows, and images as Spark reads them."""
        return isinstance(other, (RawBytes, Pixels))

    def picture(self, library: Any, row: Any, size: Size, mode: str) -> Any:
        """The image, upright, in the declared mode and size."""
        from PIL import ImageOps

        is_struct = pa.types.is_struct(row.type)
        image = of_struct(library, row) if is_struct else _reduced(library, row.as_buffer(), size)
        return FITTED[self._fit](ImageOps, upright(library, image, mode), size)


def padded(operations: Any, image: Any, size: Size) -> Any:
    """``ImageOps.pad``; with alpha, the rest is transparent.

    Raises:
        ValueError: less than half a pixel of the image would be left, and all would be black.
    """
    width, height = image.size
    if min(width, height) * min(size[0] / width, size[1] / height) <= 0.5:
        raise ValueError(
            f"it has {height} x {width} pixels, of which {size[1]} x {size[0]} would show "
            "nothing: use imageFit='crop' or 'stretch'"
        )
    return operations.pad(image, size)


FITTED: dict[str, Callable[[Any, Any, Size], Any]] = {
    "cropped": lambda operations, image, size: operations.fit(image, size),
    "padded": padded,
    "stretched": lambda operations, image, size: image.resize(size),
}
"""Brings an image to a size, with ``PIL.ImageOps``: scaled until it covers it, and cut off on both
sides; scaled until it fits into it, on black; or resized whatever its own proportions."""
FITS = {"crop": AnySize("cropped"), "pad": AnySize("padded"), "stretch": AnySize("stretched")}
"""How images are brought to the declared size, by the value of ``imageFit``."""


def upright(library: Any, image: Any, mode: str, ground: Ground = white) -> Any:
    """An image in another mode, as by ``converted``, turned as its EXIF says."""
    from PIL import ImageOps

    image = converted(library, image, mode, ground)
    ImageOps.exif_transpose(image, in_place=True)
    return image


def announced(library: Any, octets: pa.Buffer) -> Any:
    """Have Pillow open an image of any size, without decoding it.

    Raises:
        ValueError: it announces more than ``PIXELS``; other errors as ``opened``.
    """
    most = PIXELS[_is_jpeg(octets)]
    image = opened(library, octets, most)
    if math.prod(image.size) > most:
        raise ValueError(
            f"it announces {image.size[1]} x {image.size[0]} pixels, and at most {most:,} are "
            "decoded"
        )
    return image


def _is_jpeg(octets: pa.Buffer) -> bool:
    return bool(octets[: len(_JPEG)].to_pybytes() == _JPEG)


def _reduced(library: Any, octets: pa.Buffer, size: Size) -> Any:
    """An encoded image, which Pillow will decode in not much more detail than is needed."""
    image = announced(library, octets)
    if _is_jpeg(octets):
        turned = image.getexif().get(_ORIENTATION) in _TRANSPOSED
        width, height = size[::-1] if turned else size
        image.draft(None, (REDUCING_GAP * width, REDUCING_GAP * height))
    return image


def of_struct(library: Any, row: Any) -> Any:
    """An image as Spark reads it.

    Raises:
        ValueError: its numbers do not fit, or it has other than 8 bits a channel.
    """
    names = ("height", "width", "nChannels", "mode")
    height, width, channels, mode = (row[name].as_py() for name in names)
    if channels not in OPENCV_MODES or OPENCV_MODES[channels] != mode:
        raise ValueError(
            f"Spark says that {row['origin']} has nChannels {channels} and mode {mode}, which are "
            "not those of 1, 3 or 4 channels with 8 bits each"
        )
    if min(height or 0, width or 0) < 1:
        raise ValueError(f"Spark says that {row['origin']} has {height} x {width} pixels")
    data = row["data"].as_buffer()
    if data is None or data.size != height * width * channels:
        size = f"{height} x {width} x {channels}"
        raise ValueError(f"{row['origin'].as_py() or 'it'} has not the bytes of {size}")
    octets = np.frombuffer(data, np.uint8).reshape(height, width, channels)
    ordered = np.ascontiguousarray(octets[..., CHANNEL_ORDER[channels]])
    return library.fromarray(ordered if channels > 1 else ordered[..., 0])
