"""Rows of images, encoded or Spark's structs, as grey images of Pillow's, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from sparkdl.encodings.any_size import announced, of_struct, upright
from sparkdl.encodings.images import pillow
from sparkdl.user_code.tracebacks import message_of

MOST_PIXELS = 10**8
"""Of an image that is decoded; a file of a few bytes may announce any number."""


def grey_images(rows: pa.Array) -> Iterator[Any]:
    """Each row as an image of Pillow's mode ``L``, upright as its EXIF says.

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
    if pa.types.is_struct(row.type):
        return upright(library, of_struct(library, row), "L")
    return upright(library, announced(library, row.as_buffer(), MOST_PIXELS), "L")
