"""Images keep their shades, however many bits they have in the file."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch
from every_row import every
from pictures import encoded, on_white

from sparkdl import encodings

GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6
"""PNG's colour types."""
PALETTE_OF_THREE = bytes([255, 0, 0, 0, 255, 0, 10, 20, 30])


def chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def png(depth: int, colour: int, samples: list[int], transparent: bytes = b"") -> bytes:
    """One row of pixels, whose samples have ``depth`` bits."""
    width = len(samples) // {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}[colour]
    bits = "".join(format(sample, f"0{depth}b") for sample in samples)
    bits += "0" * (-len(bits) % 8)
    row = b"\0" + int(bits, 2).to_bytes(len(bits) // 8, "big")
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0))]
    if colour == PALETTE:
        parts.append(chunk(b"PLTE", PALETTE_OF_THREE))
    if transparent:
        parts.append(chunk(b"tRNS", transparent))
    parts += [chunk(b"IDAT", zlib.compress(row)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def decoded(octets: bytes, channels: int, width: int) -> tuple[Any, str]:
    """Its pixels of shape (width, channels), and why it is refused."""
    values, broken = encodings.IMAGE.decode(pa.array([octets]), (channels, 1, width), torch.uint8)
    if broken is not None:
        return None, broken.reason
    return values.flatten().to_numpy().reshape(channels, width).T.tolist(), ""


@every("depth", [1, 2, 4, 8, 16])
def test_shades_of_grey_are_the_nearest_of_eight_bits(depth: int) -> None:
    highest = (1 << depth) - 1
    samples = sorted({0, 1, highest // 3, highest // 2, highest - 1, highest})
    wanted = [[round(255 * sample / highest)] for sample in samples]
    octets = png(depth, GREY, samples)
    for channels in (1, 3):
        pixels = [shade * channels for shade in wanted]
        assert decoded(octets, channels, len(samples)) == (pixels, "")
    opaque = [shade * 3 + [255] for shade in wanted]
    assert decoded(octets, 4, len(samples)) == (opaque, "")


def test_sixteen_bits_of_a_colour_become_their_eight_within_one() -> None:
    samples = [0, 0x1234, 0xFFFF, 0x80FF, 0x0100, 0x7F80]
    near = np.array(samples) / 257
    for octets, channels in (
        (png(16, RGB, samples), 3),
        (png(16, RGBA, [*samples[:3], 0xFFFF, *samples[3:], 0x4000]), 4),
        (png(16, GREY_ALPHA, [0x1234, 0xFFFF, 0x80FF, 0xFFFF]), 1),
    ):
        pixels, fault = decoded(octets, channels, 2)
        assert fault == ""
        wanted = near[[1, 3]].reshape(2, 1) if channels == 1 else near.reshape(2, 3)
        assert np.abs(np.array(pixels)[:, :3] - wanted).max() <= 1


@every("depth", [2, 4, 8])
def test_a_palette_gives_its_colours_and_how_transparent_they_are(depth: int) -> None:
    octets = png(depth, PALETTE, [2, 0, 1], bytes([0, 128]))
    colours = [[10, 20, 30], [255, 0, 0], [0, 255, 0]]
    assert decoded(octets, 3, 3) == ([colours[0], [255, 255, 255], [127, 255, 127]], "")
    alpha = [[*colour, a] for colour, a in zip(colours, (255, 0, 128), strict=True)]
    assert decoded(octets, 4, 3) == (alpha, "")


def test_a_transparent_colour_is_found_or_the_row_refused() -> None:
    for octets, four, three in (
        (
            png(8, GREY, [5, 6], struct.pack(">H", 5)),
            [[5, 5, 5, 0], [6, 6, 6, 255]],
            [[255] * 3, [6] * 3],
        ),
        (
            png(8, RGB, [1, 2, 3, 4, 5, 6], struct.pack(">HHH", 4, 5, 6)),
            [[1, 2, 3, 255], [4, 5, 6, 0]],
            [[1, 2, 3], [255] * 3],
        ),
        (
            png(1, GREY, [0, 1], struct.pack(">H", 0)),
            [[0, 0, 0, 0], [255, 255, 255, 255]],
            [[255] * 3, [255] * 3],
        ),
    ):
        assert decoded(octets, 4, 2) == (four, "")
        assert decoded(octets, 3, 2) == (three, "")
    for octets in (
        png(2, GREY, [1, 2], struct.pack(">H", 1)),
        png(4, GREY, [1, 2], struct.pack(">H", 1)),
        png(16, GREY, [0x1234, 2], struct.pack(">H", 0x1234)),
        png(16, RGB, [0x1234] * 6, struct.pack(">HHH", 0x1234, 0x1234, 0x1234)),
    ):
        assert "its transparent colour" in decoded(octets, 4, 2)[1]
        assert decoded(octets, 3, 2)[1] == ""


def test_modes_of_eight_bits_are_converted_as_by_pillow() -> None:
    octets = np.random.default_rng(3).integers(0, 256, (4, 4, 4), dtype=np.uint8)
    clear = PIL.Image.fromarray(octets)
    opaque = clear.copy()
    opaque.putalpha(255)
    for image in (
        *(clear.convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *(opaque.convert(mode) for mode in ("LA", "RGBA")),
        *(each.quantize(8) for each in (clear, opaque)),
    ):
        file = encoded(image, "PNG")
        for channels, wanted in ((1, "L"), (3, "RGB"), (4, "RGBA")):
            values, broken = encodings.IMAGE.decode(pa.array([file]), (channels, 4, 4), torch.uint8)
            assert broken is None
            read = PIL.Image.open(io.BytesIO(file))
            expected = np.asarray((read if channels == 4 else on_white(read)).convert(wanted))
            expected = expected.reshape(4, 4, channels).transpose(2, 0, 1)
            assert np.array_equal(values.flatten().to_numpy().reshape(channels, 4, 4), expected)


def test_a_jpeg_for_print_is_converted_as_by_pillow() -> None:
    target = io.BytesIO()
    PIL.Image.new("CMYK", (2, 1), (10, 100, 200, 30)).save(target, "JPEG")
    expected = np.asarray(PIL.Image.open(target).convert("RGB"))[0].tolist()
    assert decoded(target.getvalue(), 3, 2) == (expected, "")


def test_other_modes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "open", lambda *_, **__: PIL.Image.new("F", (2, 1), 300.0))
    assert "Pillow's mode F" in decoded(png(8, GREY, [1, 2]), 1, 2)[1]
