"""Images of any size and mode: what Pillow makes of them, to the bit, or refused in words."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from pictures import FITTED, by_pillow, drawn, encoded, on_white
from PIL import Image

from sparkdl import encodings
from sparkdl.encodings import any_size
from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.pixels import FIELDS

SIZE = (24, 17)
"""Width and height, of which neither divides the other, nor those of the pictures."""
SIZES = [(24, 17), (61, 40), (40, 61), (9, 5), (5, 90), (240, 170)]
MODES_OF = {
    "BMP": ["1", "L", "P", "RGB"],
    "GIF": ["1", "L", "P", "RGB"],
    "JPEG": ["L", "RGB", "CMYK"],
    "PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"],
    "WEBP": ["RGB", "RGBA"],
}


def decoded(
    rows: pa.Array, fit: str, channels: int = 3, size: tuple[int, int] = SIZE
) -> tuple[np.ndarray, Any]:
    """Pixels of shape (rows, channels, height, width), and the rows that are refused."""
    shape = (channels, size[1], size[0])
    values, broken = FITS[fit].decode(rows, shape, torch.uint8)
    return values.flatten().to_numpy().reshape(-1, *shape), broken


def deep(width: int, height: int) -> Image.Image:
    """Sixteen bits of grey."""
    shades = np.random.default_rng(5).integers(0, 1 << 16, (height, width), dtype=np.uint16)
    return Image.fromarray(shades)


def is_as_by_pillow(octets: bytes, fit: str, channels: int = 3) -> bool:
    pixels, broken = decoded(pa.array([octets]), fit, channels)
    return not broken and np.array_equal(pixels[0], by_pillow(octets, channels, fit, SIZE))


@every("fit", FITTED)
def test_every_format_mode_and_size_is_what_pillow_makes_of_it(fit: str) -> None:
    wrong = []
    for kind, modes in MODES_OF.items():
        for mode, size in itertools.product(modes, SIZES):
            octets = encoded(deep(*size) if mode == "I;16" else drawn(*size, mode), kind)
            channels = [each for each in (1, 3, 4) if not is_as_by_pillow(octets, fit, each)]
            wrong += [(kind, mode, size, each) for each in channels]
    assert wrong == []


@every("fit", FITTED)
def test_a_transparent_palette_is_laid_on_white_and_turned_as_by_pillow(fit: str) -> None:
    clear = drawn(61, 40, "RGBA")
    clear.putalpha(clear.getchannel("A").point(lambda alpha: 0 if alpha < 128 else 255))
    for octets in (
        encoded(clear, "GIF"),
        encoded(drawn(61, 40, "RGBA").quantize(16), "PNG", 6),
        encoded(clear.quantize(16), "PNG", 6),
    ):
        assert "transparency" in Image.open(io.BytesIO(octets)).info
        assert all(is_as_by_pillow(octets, fit, channels) for channels in (1, 3, 4))


def test_padding_stays_black_around_a_picture_on_white() -> None:
    nothing = encoded(Image.new("RGBA", (10, 10)), "PNG")
    pixels, _ = decoded(pa.array([nothing]), "pad", size=(20, 10))
    assert pixels[0, :, :, 5:15].min() == 255
    assert pixels[0, :, :, :5].max() == pixels[0, :, :, 15:].max() == 0


@every("fit", FITTED)
def test_every_orientation_is_turned_upright(fit: str) -> None:
    wrong = []
    for kind, mode in (("JPEG", "RGB"), ("PNG", "RGB"), ("PNG", "I;16"), ("WEBP", "RGBA")):
        drawing = deep(61, 40) if mode == "I;16" else drawn(61, 40, mode)
        turned = {n: encoded(drawing, kind, n) for n in range(1, 9)}
        wrong += [(kind, mode, n) for n in turned if not is_as_by_pillow(turned[n], fit)]
    assert wrong == []


def test_a_photograph_on_its_side_is_the_upright_one() -> None:
    upright = drawn(40, 60)
    on_its_side = encoded(upright.transpose(Image.Transpose.ROTATE_90), "PNG", 6)
    both, broken = decoded(pa.array([encoded(upright, "PNG"), on_its_side]), "crop")
    assert broken is None
    assert np.array_equal(both[0], both[1])


@every("orientation", [1, 6])
def test_a_large_jpeg_is_decoded_at_no_more_than_its_size_needs(
    orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,600 x 1,200 pixels for 100 x 75: an eighth would be 200 x 150, twice that."""
    octets = encoded(drawn(1600, 1200), "JPEG", orientation)
    opened = []

    def seen(_: Any, image: Any, *__: Any) -> Any:
        opened.append(image.size)
        return image

    monkeypatch.setattr(any_size, "converted", seen)
    size = (100, 75) if orientation == 1 else (75, 100)
    pixels, broken = decoded(pa.array([octets]), "crop", size=size)
    assert broken is None
    assert opened == [(200, 150)]
    monkeypatch.undo()
    assert np.array_equal(pixels[0], by_pillow(octets, 3, "crop", size))
    whole = Image.open(io.BytesIO(octets)).convert("RGB")
    if orientation == 1:  # and is close to what all pixels would have given
        fitted = np.asarray(whole.resize(size)).astype(float).transpose(2, 0, 1)
        assert np.abs(fitted - pixels[0]).mean() < 12


@every("fit", FITTED)
def test_sparks_own_images_are_what_pillow_makes_of_their_pixels(fit: str) -> None:
    wrong = []
    for mode, channels_in, cv in (("L", 1, 0), ("RGB", 3, 16), ("RGBA", 4, 24)):
        drawing = drawn(61, 40, mode)
        pixels = np.asarray(drawing).reshape(40, 61, channels_in)
        stored = pixels[..., {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[channels_in]].tobytes()
        rows = structs([("file:/a.png", 40, 61, channels_in, cv, stored)])
        for channels in (1, 3, 4):
            found, broken = decoded(rows, fit, channels)
            expected = by_pillow(encoded(drawing, "PNG"), channels, fit, SIZE)
            if broken or not np.array_equal(found[0], expected):
                wrong.append((mode, channels, broken))
    assert wrong == []


def structs(rows: list[tuple[Any, ...]]) -> pa.Array:
    kinds = [pa.string(), pa.int32(), pa.int32(), pa.int32(), pa.int32(), pa.binary()]
    columns = [[row[index] for row in rows] for index in range(len(kinds))]
    fields = [pa.array(each, kind) for each, kind in zip(columns, kinds, strict=True)]
    return pa.StructArray.from_arrays(fields, FIELDS)


@every_row(
    (("a", -1, -1, -1, -1, b""), "that a has nChannels -1 and mode -1"),
    (("a", None, None, None, None, None), "nChannels None"),
    (("a", 2, 2, 3, 0, bytes(12)), "nChannels 3 and mode 0"),
    (("a", 2, 2, 3, 16, bytes(11)), "has not the bytes of 2 x 2 x 3"),
    (("a", 0, 0, 3, 16, b""), "has 0 x 0 pixels"),
    (("a", -1, 2, 3, 16, bytes(12)), "has -1 x 2 pixels"),
    (("a", 2, None, 3, 16, bytes(12)), "has 2 x None pixels"),
)
def test_what_spark_could_not_read_is_a_broken_row(row: tuple[Any, ...], reason: str) -> None:
    good = ("b", 2, 2, 3, 16, bytes(12))
    pixels, broken = decoded(structs([good, row, good]), "crop")
    assert broken.rows.tolist() == [1]
    assert reason in broken.reason
    assert len(pixels) == 2


@every_row(
    ((8192, 8192), "JPEG", True),
    ((8192, 8193), "JPEG", False),
    ((8192, 4096), "PNG", True),
    ((8192, 4097), "PNG", False),
    ((20_000, 20_000), "PNG", False),
)
@pytest.mark.filterwarnings("error")
def test_the_limit_is_of_announced_pixels(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], kind: str, fits: bool
) -> None:
    """A file of a few bytes that announces the size: nothing of it is decoded."""
    reached = []
    monkeypatch.setattr(any_size, "converted", lambda *_: reached.append(True))
    octets = bytearray(encoded(drawn(8, 6), kind))
    if kind == "JPEG":
        start = octets.index(b"\xff\xc0") + 5
        octets[start : start + 4] = struct.pack(">HH", *size[::-1])
    else:
        header = b"IHDR" + struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
        octets[12:33] = header + struct.pack(">I", zlib.crc32(header))
    _, broken = decoded(pa.array([bytes(octets)]), "crop")
    assert bool(reached) == fits
    if not fits:
        assert "pixels" in broken.reason


def test_a_picture_that_padding_would_leave_nothing_of_is_refused() -> None:
    line = encoded(drawn(2000, 10), "PNG")
    pixels, broken = decoded(pa.array([line]), "pad")
    assert len(pixels) == 0
    assert "10 x 2000 pixels, of which 17 x 24 would show nothing" in broken.reason
    assert decoded(pa.array([line]), "crop")[1] is None


@every("fit", FITTED)
def test_damaged_files_are_broken_rows_and_the_others_remain(fit: str) -> None:
    good = encoded(drawn(61, 40), "JPEG")
    rows = [good, good[: len(good) // 2], b"", b"\xff\xd8", b"GIF89a", encoded(drawn(9, 9), "TIFF")]
    pixels, broken = decoded(pa.array([*rows, good], pa.binary()), fit)
    assert broken.rows.tolist() == [1, 2, 3, 4, 5]
    assert len(pixels) == 2
    assert np.array_equal(pixels[0], by_pillow(good, 3, fit, SIZE))


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


def shades_of(octets: bytes, channels: int, width: int) -> tuple[Any, str]:
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
        assert shades_of(octets, channels, len(samples)) == (pixels, "")
    opaque = [shade * 3 + [255] for shade in wanted]
    assert shades_of(octets, 4, len(samples)) == (opaque, "")


def test_sixteen_bits_of_a_colour_become_their_eight_within_one() -> None:
    samples = [0, 0x1234, 0xFFFF, 0x80FF, 0x0100, 0x7F80]
    near = np.array(samples) / 257
    for octets, channels in (
        (png(16, RGB, samples), 3),
        (png(16, RGBA, [*samples[:3], 0xFFFF, *samples[3:], 0x4000]), 4),
        (png(16, GREY_ALPHA, [0x1234, 0xFFFF, 0x80FF, 0xFFFF]), 1),
    ):
        pixels, fault = shades_of(octets, channels, 2)
        assert fault == ""
        wanted = near[[1, 3]].reshape(2, 1) if channels == 1 else near.reshape(2, 3)
        assert np.abs(np.array(pixels)[:, :3] - wanted).max() <= 1


@every("depth", [2, 4, 8])
def test_a_palette_gives_its_colours_and_how_transparent_they_are(depth: int) -> None:
    octets = png(depth, PALETTE, [2, 0, 1], bytes([0, 128]))
    colours = [[10, 20, 30], [255, 0, 0], [0, 255, 0]]
    assert shades_of(octets, 3, 3) == ([colours[0], [255, 255, 255], [127, 255, 127]], "")
    alpha = [[*colour, a] for colour, a in zip(colours, (255, 0, 128), strict=True)]
    assert shades_of(octets, 4, 3) == (alpha, "")


def test_a_transparent_colour_is_found_or_the_row_refused() -> None:
    grey = png(8, GREY, [5, 6], struct.pack(">H", 5))
    coloured = png(8, RGB, [1, 2, 3, 4, 5, 6], struct.pack(">HHH", 4, 5, 6))
    for octets, four, three in (
        (grey, [[5, 5, 5, 0], [6, 6, 6, 255]], [[255] * 3, [6] * 3]),
        (coloured, [[1, 2, 3, 255], [4, 5, 6, 0]], [[1, 2, 3], [255] * 3]),
        (
            png(1, GREY, [0, 1], struct.pack(">H", 0)),
            [[0, 0, 0, 0], [255, 255, 255, 255]],
            [[255] * 3, [255] * 3],
        ),
    ):
        assert shades_of(octets, 4, 2) == (four, "")
        assert shades_of(octets, 3, 2) == (three, "")
    for octets in (
        png(2, GREY, [1, 2], struct.pack(">H", 1)),
        png(4, GREY, [1, 2], struct.pack(">H", 1)),
        png(16, GREY, [0x1234, 2], struct.pack(">H", 0x1234)),
        png(16, RGB, [0x1234] * 6, struct.pack(">HHH", 0x1234, 0x1234, 0x1234)),
    ):
        assert "its transparent colour" in shades_of(octets, 4, 2)[1]
        assert shades_of(octets, 3, 2)[1] == ""


def test_modes_of_eight_bits_are_converted_as_by_pillow() -> None:
    octets = np.random.default_rng(3).integers(0, 256, (4, 4, 4), dtype=np.uint8)
    clear = Image.fromarray(octets)
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
            read = Image.open(io.BytesIO(file))
            expected = np.asarray((read if channels == 4 else on_white(read)).convert(wanted))
            expected = expected.reshape(4, 4, channels).transpose(2, 0, 1)
            assert np.array_equal(values.flatten().to_numpy().reshape(channels, 4, 4), expected)


def test_a_jpeg_for_print_is_converted_as_by_pillow() -> None:
    target = io.BytesIO()
    Image.new("CMYK", (2, 1), (10, 100, 200, 30)).save(target, "JPEG")
    expected = np.asarray(Image.open(target).convert("RGB"))[0].tolist()
    assert shades_of(target.getvalue(), 3, 2) == (expected, "")


def test_other_modes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", lambda *_, **__: Image.new("F", (2, 1), 300.0))
    assert "Pillow's mode F" in shades_of(png(8, GREY, [1, 2]), 1, 2)[1]
