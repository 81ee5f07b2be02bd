"""Rows of images as grey ones, and their hashes of 64 bits, by ``imagehash``.

A hash is an int64 whose most significant bit is the first of the 8 x 8, row by row, so that it is
``int(str(imagehash.dhash(image)), 16)`` as a signed number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.encodings.any_size import announced, of_struct, upright
from sparkdl.encodings.images import pillow
from sparkdl.errors import SetupError
from sparkdl.user_code.tracebacks import message_of

IMAGE_HASHES = {
    "dhash": "dhash",
    "ahash": "average_hash",
    "phash": "phash",
    "whash": "whash",
}
"""By what ``imagehash`` calls each."""
_GROUNDS = np.array([255, 0, 128])
"""Greys that transparent images are laid on; of those with equal contrast, the first."""
_CONTRAST = 64
"""From this difference of greys on, a larger one does not make a ground better."""


def grey_images(rows: pa.Array) -> Iterator[Any]:
    """Each row as an image of Pillow's mode ``L``, upright as its EXIF says, without transparency.

    Args:
        rows: binary rows with a BMP, GIF, JPEG, PNG or WebP each, or Spark's image structs.

    Yields:
        The image; a text that says what is wrong with a row; None for null.

    Raises:
        SetupError: Pillow is not installed.
    """
    library = pillow()
    for row in rows:
        try:
            found = _grey(library, row) if row.is_valid else None
        except Exception as error:  # Pillow raises almost anything for bytes that are no image
            found = message_of(error)
        yield found


def _grey(library: Any, row: Any) -> Any:
    is_struct = pa.types.is_struct(row.type)
    image = of_struct(library, row) if is_struct else announced(library, row.as_buffer())
    return upright(library, image, "L", _ground)


def _ground(image: Any) -> int:
    """The grey from which the visible pixels of an image with alpha differ most."""
    shades = np.array(image.convert("L").histogram(image.getchannel("A")))
    distances = np.abs(_GROUNDS[:, None] - np.arange(256)).clip(max=_CONTRAST)
    return int(_GROUNDS[(distances @ shades).argmax()])


def hashed(image: Any, kind: str) -> np.ndarray:
    """The bits of an image's hash, shape (64,), the most significant first.

    Args:
        image: Pillow's, of mode ``L``.
        kind: one of ``IMAGE_HASHES``.
    """
    bits: np.ndarray = getattr(imagehash(), IMAGE_HASHES[kind])(image).hash
    return bits.reshape(64)


def imagehash() -> Any:
    """The package.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import imagehash as found
    except ImportError as error:
        raise SetupError(
            "hashes of images need imagehash, which is not installed here: "
            "pip install 'sparkdl-torch[dedup]'"
        ) from error
    return found


def as_words(bits: np.ndarray) -> np.ndarray:
    """Bits of shape (rows, 64), the most significant first, as int64 of shape (rows,)."""
    return np.packbits(bits, axis=1).view(">u8").astype(np.uint64).view(np.int64).reshape(-1)
