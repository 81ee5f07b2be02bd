"""Rows of images, encoded or Spark's structs, as grey images of Pillow's, one after another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from sparkdl.encodings import PIXELS
from sparkdl.encodings.images import converted, opened
from sparkdl.encodings.pixels import OPENCV_MODES
from sparkdl.errors import SetupError
from sparkdl.user_code.tracebacks import message_of

MOST_PIXELS = 10**8
"""Of an image that is decoded; a file of a few bytes may announce any number."""
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
    from PIL import ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", library.DecompressionBombWarning)
        image = opened(library, octets, MOST_PIXELS)
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ValueError(f"it has {height} x {width} pixels, more than {MOST_PIXELS:,}")
    image.load()
    return ImageOps.exif_transpose(converted(library, image, "L"))


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
