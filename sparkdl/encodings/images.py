"""Encoded images as bytes in torch's order: channels first.

They may come from anybody. Only the formats that data sets are made of are opened, because in some
of Pillow's others an image contains another one of any size, or runs a program; and no pixel is
decoded of an image that does not have the declared size.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.encodings.encoding import DecodedRows, Encoding, Shape, broken_where
from sparkdl.encodings.numbers import RawBytes
from sparkdl.encodings.pixels import OfPixels, channels_first
from sparkdl.errors import SetupError
from sparkdl.user_code.tracebacks import message_of

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""The formats that are opened, by Pillow's names."""
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for an image by its number of channels."""
CONVERTED = frozenset({"1", "CMYK", "L", "LA", "P", "RGB", "RGBA"})
"""The modes that Pillow converts to these; it clips the values of others, such as ``F``."""
Size = tuple[int, int]
"""Width and height in pixels."""
_FEW_PIXELS = 2**24
"""An image with as many may be opened whatever size is declared: it is refused by its size then."""
_LIMITING = threading.Lock()
_DEEP = frozenset({"I", "I;16", "I;16B", "I;16L"})
"""The modes in which versions of Pillow open a PNG with 16 bits of grey a pixel."""


class Images(OfPixels):
    """BMP, GIF, JPEG, PNG and WebP; if there are several frames, the first."""

    name = "image"
    chosen = True

    def takes(self, kind: pa.DataType) -> bool:
        """None: these are binary rows, whose type does not tell that they are images."""
        return False

    def reads(self, other: Encoding) -> bool:
        """Binary rows."""
        return isinstance(other, RawBytes)

    def grown_elements(self, values: pa.Array, shape: Shape) -> int:
        """All pixels."""
        return math.prod(shape)

    def decode(self, values: pa.Array, shape: Shape, dtype: torch.dtype) -> DecodedRows:
        """Lists of bytes, opened one by one.

        Raises:
            SetupError: Pillow is not installed.
        """
        library = _pillow()
        channels, height, width = shape
        mode = MODES[channels]
        decoded = np.empty((len(values), height, width, channels), dtype=np.uint8)
        wrong = np.zeros(len(values), dtype=bool)
        reason = ""
        for row, encoded in enumerate(values):
            try:
                with _opened(library, encoded.as_buffer(), (width, height)) as image:
                    pixels = _converted(library, image, mode)
                    octets = np.frombuffer(pixels.tobytes(), np.uint8)
                    decoded[row] = octets.reshape(height, width, channels)
            except Exception as error:  # Pillow raises almost anything for bytes that are no image
                reason = reason or f"is not a valid image: {message_of(error)}"
                wrong[row] = True
        broken = broken_where(wrong, reason)
        return channels_first(decoded if broken is None else decoded[~wrong]), broken


IMAGE = Images()


def _opened(library: Any, octets: pa.Buffer, wanted: Size) -> Any:
    """Have Pillow open an image, and check that it has the size that is wanted.

    Raises:
        ValueError: it has another size or format; Pillow may raise other errors.
    """
    try:
        with _limited(library, max(math.prod(wanted), _FEW_PIXELS)):
            image = library.open(io.BytesIO(octets), formats=FORMATS)
    except library.UnidentifiedImageError as error:
        raise ValueError(f"it is not one of {', '.join(FORMATS)}, or it is damaged") from error
    except library.DecompressionBombError as error:
        raise ValueError(
            f"it claims far more pixels than {wanted[1]} x {wanted[0]}: {error}"
        ) from error
    if image.size != wanted:
        raise ValueError(_other_size(image.size, wanted))
    return image


@contextmanager
def _limited(library: Any, pixels: int) -> Iterator[None]:
    """Have Pillow refuse what claims more than twice as many pixels.

    Pillow allocates memory while it reads a header: for a GIF's screen and for a WebP's canvas.
    Its limit is one of the process, so it is put back at once.
    """
    with _LIMITING:
        before = library.MAX_IMAGE_PIXELS
        library.MAX_IMAGE_PIXELS = pixels
        try:
            yield
        finally:
            library.MAX_IMAGE_PIXELS = before


def _converted(library: Any, image: Any, mode: str) -> Any:
    """An image in another mode.

    Raises:
        ValueError: its values cannot be kept.
    """
    if mode == "RGBA" and image.format == "PNG" and "transparency" in image.info:
        # Pillow looks for the transparent colour, which has as many bits as the file's pixels,
        # among pixels that it has brought to 8 bits.
        stored = str(image.tile[0][3])
        if ";" in stored and image.mode != "P":
            raise ValueError(
                f"its transparent colour is one of pixels of other than 8 bits a channel ({stored})"
            )
    if image.mode in _DEEP and image.format == "PNG":
        deep = np.asarray(image).astype(np.uint32)
        image = library.fromarray(((deep + 128) // 257).astype(np.uint8))
    elif image.mode not in CONVERTED:
        raise ValueError(f"its pixels, of Pillow's mode {image.mode}, cannot become 8 bits each")
    if mode != "RGBA":
        image.info.pop("transparency", None)  # Pillow would warn that it gets lost
    # Converting copies, even to the mode that it already has; so would numpy.
    return image if image.mode == mode else image.convert(mode)


def _other_size(found: Size, wanted: Size) -> str:
    return f"it has {found[1]} x {found[0]} pixels, not {wanted[1]} x {wanted[0]}"


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise SetupError(
            "encoded images are decoded with Pillow, which is not installed here: "
            "pip install 'sparkdl-torch[images]'"
        ) from error
    return PIL.Image
