"""The size that an image claims, read from its header before a library gets to see it.

Image libraries allocate memory while they read the header: Pillow for the background of a GIF's
first frame and for a WebP's canvas, and before version 12 for an animated PNG's. Fifty bytes from
a stranger could thus take gigabytes. JPEG and BMP allocate nothing before their pixels are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Size = tuple[int, int]
"""Width and height in pixels."""


def announced_sizes(octets: memoryview) -> Iterator[Size]:
    """Every size that a header claims for its image, or for the first of several frames.

    Args:
        octets: an encoded image, or anything else.

    Yields:
        The sizes found in a GIF, PNG or WebP, which need not agree; none for other formats.

    Raises:
        ValueError: the header ends too soon.
    """
    octets = octets.cast("B")  # Arrow's bytes are signed, so a length could be negative
    head = octets[:12].tobytes()
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            yield from _png_sizes(octets)
        elif head.startswith((b"GIF87a", b"GIF89a")):
            yield from _gif_sizes(octets)
        elif head.startswith(b"RIFF") and head.endswith(b"WEBP"):
            yield _webp_size(octets)
    except (struct.error, IndexError) as error:
        raise ValueError(f"its header is cut off after {len(octets)} bytes") from error


def _png_sizes(octets: memoryview) -> Iterator[Size]:
    """The size in each header before the pixels: Pillow uses the last if there are several."""
    start, name = 8, b""
    while name != b"IDAT":
        length, name = struct.unpack_from(">I4s", octets, start)
        if name == b"IHDR":
            yield struct.unpack_from(">II", octets, start + 8)
        start += 12 + length


def _gif_sizes(octets: memoryview) -> Iterator[Size]:
    """The size of the screen, and that which the first frame and its offset need."""
    width, height, flags = struct.unpack_from("<HHB", octets, 6)
    yield width, height
    start = 13 + (3 * 2 << (flags & 7) if flags & 0x80 else 0)
    while octets[start] != ord(","):
        if octets[start] == ord("!"):
            start += 2
            while octets[start]:
                start += 1 + octets[start]
        start += 1
    left, top, width, height = struct.unpack_from("<HHHH", octets, start + 1)
    yield left + width, top + height


def _webp_size(octets: memoryview) -> Size:
    """The size of the canvas, or of the only image."""
    kind = octets[12:16].tobytes()
    if kind == b"VP8X":
        (both,) = struct.unpack("<Q", octets[24:30].tobytes() + bytes(2))
        return 1 + (both & 0xFFFFFF), 1 + (both >> 24)
    if kind == b"VP8L":
        (both,) = struct.unpack_from("<I", octets, 21)
        return 1 + (both & 0x3FFF), 1 + (both >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", octets, 26)
    return width & 0x3FFF, height & 0x3FFF
