"""Encoded images as bytes in torch's order: channels first.

They may come from anybody. Only the formats that data sets are made of are opened, because in some
of Pillow's others an image contains another one of any size, or runs a program; and no pixel is
decoded of an image that announces another size than it may have.
"""

from __future__ import annotations

import io
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.encodings.encoding import DecodedRows, Encoding, Shape, broken_where, lists_of
from sparkdl.encodings.numbers import RawBytes
from sparkdl.encodings.pixels import OfPixels
from sparkdl.errors import required
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
Ground = Callable[[Any], int]
"""Returns the grey that an image with alpha is laid on."""
_FEW_PIXELS = 2**24
"""An image with as many may be opened whatever size is declared: it is refused by its size then."""
_LIMITING = threading.Lock()
_DEEP = frozenset({"I", "I;16", "I;16B", "I;16L"})
"""The modes in which versions of Pillow open a PNG with 16 bits of grey a pixel."""


class Pictures(OfPixels):
    """Images that are opened one by one."""

    chosen = True

    def takes(self, kind: pa.DataType) -> bool:
        """None: these are binary rows, whose type does not tell that they are images."""
        return False

    def grown_elements(self, values: pa.Array, shape: Shape) -> int:
        """All pixels."""
        return math.prod(shape)

    @abstractmethod
    def picture(self, library: Any, row: Any, size: Size, mode: str) -> Any:
        """An image of Pillow's, of that size and mode.

        Args:
            library: ``PIL.Image``.
            row: the Arrow scalar that holds it.
            size: the size that was declared.
            mode: the mode of that many channels.

        Raises:
            ValueError: the row holds no such image; Pillow may raise other errors.
        """

    def decode(self, values: pa.Array, shape: Shape, dtype: torch.dtype) -> DecodedRows:
        """Lists of bytes, opened one by one.

        Raises:
            SetupError: Pillow is not installed.
        """
        library = pillow()
        channels, height, width = shape
        mode = MODES[channels]
        decoded = np.empty((len(values), *shape), dtype=np.uint8)
        wrong = np.zeros(len(values), dtype=bool)
        reason = ""
        for row, encoded in enumerate(values):
            try:
                image = self.picture(library, encoded, (width, height), mode)
                octets = np.frombuffer(image.tobytes(), np.uint8)
                decoded[row] = octets.reshape(height, width, channels).transpose(2, 0, 1)
            except Exception as error:  # Pillow raises almost anything for bytes that are no image
                reason = reason or f"is not a valid image: {message_of(error)}"
                wrong[row] = True
        broken = broken_where(wrong, reason)
        kept = decoded if broken is None else decoded[~wrong]
        return lists_of(kept.reshape(-1), len(kept)), broken


class Images(Pictures):
    """BMP, GIF, JPEG, PNG and WebP; if there are several frames, the first."""

    name = "image"

    def reads(self, other: Encoding) -> bool:
        """Binary rows."""
        return isinstance(other, RawBytes)

    def picture(self, library: Any, row: Any, size: Size, mode: str) -> Any:
        """The image as it is in the file; it must have the declared size."""
        image = opened(library, row.as_buffer(), max(math.prod(size), _FEW_PIXELS))
        if image.size != size:
            raise ValueError(_other_size(image.size, size))
        return converted(library, image, mode)


IMAGE = Images()


def opened(library: Any, octets: pa.Buffer, pixels: int) -> Any:
    """Have Pillow open an image, without decoding it.

    Args:
        library: ``PIL.Image``.
        octets: the file.
        pixels: what claims more than twice as many is refused, before memory is taken for it.

    Raises:
        ValueError: it is refused, or has another format; Pillow may raise other errors.
    """
    try:
        with _limited(library, pixels):
            return library.open(io.BytesIO(octets), formats=FORMATS)
    except library.UnidentifiedImageError as error:
        raise ValueError(f"it is not one of {', '.join(FORMATS)}, or it is damaged") from error
    except library.DecompressionBombError as error:
        raise ValueError(f"it claims far more pixels than {pixels:,}: {error}") from error


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


def white(_: Any) -> int:
    """The ground that images with transparency are laid on."""
    return 255


def converted(library: Any, image: Any, mode: str, ground: Ground = white) -> Any:
    """An image in another mode; in one without alpha, laid on a ground if any of it is transparent.

    Args:
        library: ``PIL.Image``.
        image: Pillow's, not yet decoded.
        mode: one of ``MODES``.
        ground: returns the grey of the ground for an image of mode ``LA`` or ``RGBA``.

    Raises:
        ValueError: its values cannot be kept.
    """
    if mode != "RGBA":
        clear = _transparent(library, image)
        image = image if clear is None else _laid(library, clear, ground(clear))
    elif stored := _colour_not_found(image):
        raise ValueError(
            f"its transparent colour is one of pixels of other than 8 bits a channel ({stored})"
        )
    if image.mode in _DEEP and image.format == "PNG":
        deep = np.asarray(image).astype(np.uint32)
        info = image.info
        image = library.fromarray(((deep + 128) // 257).astype(np.uint8))
        image.info = dict(info)  # which says how it is turned
    elif image.mode not in CONVERTED:
        raise ValueError(f"its pixels, of Pillow's mode {image.mode}, cannot become 8 bits each")
    if mode != "RGBA":
        image.info.pop("transparency", None)  # Pillow would warn that it gets lost
    # Converting copies, even to the mode that it already has; so would numpy.
    return image if image.mode == mode else image.convert(mode)


def _transparent(library: Any, image: Any) -> Any:
    """An image with its alpha, of mode ``LA`` or ``RGBA``; None if all its pixels are opaque."""
    if image.mode not in ("LA", "RGBA"):
        if "transparency" not in image.info or _colour_not_found(image):
            return None
        image = converted(library, image, "RGBA")
    return None if image.getchannel("A").getextrema()[0] == 255 else image


def _laid(library: Any, image: Any, grey: int) -> Any:
    whole = library.new("RGB", image.size, (grey,) * 3)
    whole.paste(image, mask=image)  # the pixels of alpha_composite, with half its memory
    whole.info = {name: each for name, each in image.info.items() if name != "transparency"}
    return whole


def _colour_not_found(image: Any) -> str:
    """Pixels of a PNG as stored, if it has a transparent colour that Pillow does not find."""
    if image.format != "PNG" or "transparency" not in image.info or image.mode == "P":
        return ""
    # That colour has as many bits as the file's pixels, which Pillow has brought to 8 bits.
    stored = str(image.tile[0][3])
    return stored if ";" in stored else ""


def _other_size(found: Size, wanted: Size) -> str:
    return (
        f"it has {found[1]} x {found[0]} pixels, not {wanted[1]} x {wanted[0]}. With imageSize="
        f"({wanted[1]}, {wanted[0]}) images of any size are brought to it"
    )


def pillow() -> Any:
    """Pillow's module of images.

    Raises:
        SetupError: it is not installed.
    """
    with required("encoded images are decoded with Pillow", "images"):
        import PIL.Image
    return PIL.Image
