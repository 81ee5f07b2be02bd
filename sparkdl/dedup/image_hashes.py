"""Rows of images as grey ones, and their hashes of 64 bits, equal to those of ``imagehash``.

A hash is an int64 whose most significant bit is the first of the 8 x 8, row by row, so that it is
``int(str(imagehash.dhash(image)), 16)`` as a signed number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.encodings.any_size import announced, of_struct, upright
from sparkdl.encodings.images import pillow
from sparkdl.errors import SetupError
from sparkdl.user_code.tracebacks import message_of

IMAGE_HASHES = ("dhash", "ahash", "phash", "whash")
_SIZES = {"ahash": (8, 8), "dhash": (9, 8), "phash": (32, 32)}
"""Width and height to which an image is reduced."""
_GROUNDS = np.array([255, 0, 128])
"""Greys that transparent images are laid on; of those with equal contrast, the first."""
_CONTRAST = 64
"""From this difference of greys on, a larger one does not make a ground better."""
_ROOT = 0.7071067811865476
"""Of one half, as PyWavelets rounds it: bits that hang on a tie come out as its do."""


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


def reduced(image: Any, kind: str) -> np.ndarray:
    """What the hash of an image depends on.

    Args:
        image: Pillow's, of mode ``L``.
        kind: one of ``IMAGE_HASHES``.

    Returns:
        The pixels of the reduced image, shape (height, width), uint8; for ``whash`` the low
        frequencies, shape (8, 8), float64.
    """
    lanczos = 1  # PIL.Image.Resampling.LANCZOS, in all versions
    if kind != "whash":
        return np.asarray(image.resize(_SIZES[kind], lanczos))
    side = max(2 ** int(math.log2(min(image.size))), 8)
    return _low_frequencies(np.asarray(image.resize((side, side), lanczos)) / 255.0)


def hashed(images: np.ndarray, kind: str) -> np.ndarray:
    """The hashes of reduced images.

    Args:
        images: as ``reduced`` returns them, stacked, shape (rows, height, width).
        kind: one of ``IMAGE_HASHES``.

    Returns:
        Shape (rows,), int64.
    """
    if kind == "dhash":
        bits = images[:, :, 1:] > images[:, :, :-1]
    elif kind == "ahash":
        bits = images > images.mean(axis=(1, 2), keepdims=True)
    else:
        values = _cosines(images) if kind == "phash" else images
        bits = values > np.median(values, axis=(1, 2), keepdims=True)
    return as_words(bits.reshape(len(images), 64))


def as_words(bits: np.ndarray) -> np.ndarray:
    """Bits of shape (rows, 64), the most significant first, as int64 of shape (rows,)."""
    return np.packbits(bits, axis=1).view(">u8").astype(np.uint64).view(np.int64).reshape(-1)


def _cosines(images: np.ndarray) -> np.ndarray:
    """The 8 x 8 lowest frequencies of the discrete cosine transform (type II, not normalised)."""
    dct = cosine_transform()
    frequencies: np.ndarray = dct(dct(images, axis=1), axis=2)
    return frequencies[:, :8, :8]


def cosine_transform() -> Any:
    """SciPy's.

    Raises:
        SetupError: it is not installed.
    """
    try:
        from scipy.fft import dct
    except ImportError as error:
        raise SetupError(
            "hash='phash' needs SciPy, which is not installed here: "
            "pip install 'sparkdl-torch[dedup]'"
        ) from error
    return dct


def _low_frequencies(pixels: np.ndarray) -> np.ndarray:
    """Haar's approximation of 8 x 8, of an image whose mean has been taken away.

    The mean goes as in ``imagehash``: the image is taken apart down to one number and put together
    without it.

    Args:
        pixels: float64, shape (side, side), side a power of 2 and at least 8.
    """
    details, low = [], pixels
    while len(low) > 1:
        low, detail = _apart(low)
        details.append(detail)
    low = low * 0
    for detail in reversed(details):
        low = _together(low, detail)
    while len(low) > 8:
        low, _ = _apart(low)
    return low


def _apart(image: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    (low, high) = _halves(image)
    (mean, across), (down, both) = _halves(low.T), _halves(high.T)
    return mean.T, (across.T, down.T, both.T)


def _halves(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums and differences of pairs of rows."""
    even, odd = image[0::2] * _ROOT, image[1::2] * _ROOT
    return even + odd, even - odd


def _together(mean: np.ndarray, details: tuple[np.ndarray, ...]) -> np.ndarray:
    across, down, both = details
    low, high = _whole(mean.T, across.T).T, _whole(down.T, both.T).T
    return _whole(low, high)


def _whole(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    rows = np.empty((2 * len(low), low.shape[1]))
    rows[0::2], rows[1::2] = low * _ROOT + high * _ROOT, low * _ROOT - high * _ROOT
    return rows
