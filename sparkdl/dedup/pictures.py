"""Rows of images, encoded or Spark's structs, as grey images of Pillow's, one after another."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pyarrow as pa

from sparkdl.encodings import IMAGE, PIXELS
from sparkdl.encodings.images import FORMATS
from sparkdl.encodings.pixels import OPENCV_MODES
from sparkdl.errors import SetupError
from sparkdl.user_code.tracebacks import message_of

MOST_PIXELS = 10**8
"""Of an image that is decoded; a file of a few bytes may announce any number."""
_ORIENTATION = 0x0112
"""The tag of EXIF that says how a camera was held."""
_RAW_ORDERS = {1: ("L", "L"), 3: ("RGB", "BGR"), 4: ("RGBA", "BGRA")}
"""Pillow's mode and its name of the order of bytes in Spark's image struct, by channels."""


def grey_images(rows: pa.Array) -> Iterator[Any]:
    """Each row as an image of Pillow's mode ``L``, upright as its EXIF says.

    Args:
        rows: binary rows with a BMP, GIF, JPEG, PNG or WebP each, or Spark's image structs.

    Yields:
        The image; a text that says what is wrong with a row; None for null.
    """
    library = pillow()
    if PIXELS.takes(rows.type):
        fields = dict(zip((field.name for field in rows.type), rows.flatten(), strict=True))
        known = rows.is_valid().to_pylist()
        for index in range(len(rows)):
            row = {name: fields[name][index] for name in _FIELDS}
            yield _attempt(_of_struct, library, row) if known[index] else None
    else:
        for each in rows:
            yield _attempt(_of_file, library, each.as_buffer()) if each.is_valid else None


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """An image as it was seen: the first two axes turned and mirrored.

    Args:
        pixels: shape (height, width, ...).
        orientation: EXIF's, 1 to 8; another number changes nothing.
    """
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    down, across = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return pixels[:: -1 if down else 1, :: -1 if across else 1]


def pillow() -> Any:
    """Pillow's module of images.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise SetupError(
            "images are compared with Pillow, which is not installed here: "
            "pip install 'sparkdl-torch[dedup]'"
        ) from error
    return PIL.Image


_FIELDS = ("height", "width", "nChannels", "mode", "data")


def _attempt(decode: Callable[[Any, Any], Any], library: Any, row: Any) -> Any:
    try:
        return decode(library, row)
    except Exception as error:  # Pillow raises almost anything for bytes that are no image
        return message_of(error)


def _of_file(library: Any, octets: pa.Buffer) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", library.DecompressionBombWarning)
        try:
            with library.open(io.BytesIO(octets), formats=FORMATS) as image:
                width, height = image.size
                orientation = image.getexif().get(_ORIENTATION, 1)
        except library.UnidentifiedImageError as error:
            raise ValueError(f"it is not one of {', '.join(FORMATS)}, or it is damaged") from error
    if width * height > MOST_PIXELS:
        raise ValueError(f"it has {height} x {width} pixels, more than {MOST_PIXELS:,}")
    encoded = pa.array([octets.to_pybytes()], pa.large_binary())
    decoded, broken = IMAGE.decode(encoded, (1, height, width), cast("Any", None))
    if broken is not None:
        raise ValueError(broken.reason)
    pixels = decoded.flatten().to_numpy().reshape(height, width)
    return library.fromarray(np.ascontiguousarray(upright(pixels, orientation)))


def _of_struct(library: Any, row: dict[str, pa.Scalar]) -> Any:
    height, width, channels, mode = (row[name].as_py() for name in _FIELDS[:4])
    if OPENCV_MODES.get(channels, -1) != mode or min(height, width) < 1:
        raise ValueError(
            f"it is an image of nChannels {channels}, mode {mode}, {height} x {width} pixels; 8 "
            f"bits a channel have mode {OPENCV_MODES}"
        )
    kind, order = _RAW_ORDERS[channels]
    octets = row["data"].as_buffer()
    if octets is None or octets.size != height * width * channels:
        raise ValueError(f"it has not the bytes of {height} x {width} x {channels}")
    image = library.frombytes(kind, (width, height), octets.to_pybytes(), "raw", order)
    return image.convert("L")
