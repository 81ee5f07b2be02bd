"""Images of any size: what plain Pillow makes of them, to the bit, or refused in words."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from pictures import FITTED, by_pillow, drawn, encoded
from PIL import Image

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


@every("fit", FITTED)
def test_every_format_mode_and_size_is_what_pillow_makes_of_it(fit: str) -> None:
    wrong = []
    for kind, modes in MODES_OF.items():
        for mode in modes:
            for width, height in SIZES:
                drawing = deep(width, height) if mode == "I;16" else drawn(width, height, mode)
                octets = encoded(drawing, kind)
                for channels in (1, 3, 4):
                    expected = by_pillow(octets, channels, fit, SIZE)
                    pixels, broken = decoded(pa.array([octets]), fit, channels)
                    if broken or not np.array_equal(pixels[0], expected):
                        wrong.append((kind, mode, width, height, channels, broken))
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
        for channels in (1, 3, 4):
            pixels, broken = decoded(pa.array([octets]), fit, channels)
            assert broken is None
            assert np.array_equal(pixels[0], by_pillow(octets, channels, fit, SIZE))


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
        for orientation in range(1, 9):
            octets = encoded(drawing, kind, orientation)
            pixels, broken = decoded(pa.array([octets]), fit)
            expected = by_pillow(octets, 3, fit, SIZE)
            if broken or not np.array_equal(pixels[0], expected):
                wrong.append((kind, mode, orientation, broken))
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


@every(
    ("row", "reason"),
    [
        (("a", -1, -1, -1, -1, b""), "that a has nChannels -1 and mode -1"),
        (("a", None, None, None, None, None), "nChannels None"),
        (("a", 2, 2, 3, 0, bytes(12)), "nChannels 3 and mode 0"),
        (("a", 2, 2, 3, 16, bytes(11)), "has not the bytes of 2 x 2 x 3"),
        (("a", 0, 0, 3, 16, b""), "has 0 x 0 pixels"),
        (("a", -1, 2, 3, 16, bytes(12)), "has -1 x 2 pixels"),
        (("a", 2, None, 3, 16, bytes(12)), "has 2 x None pixels"),
    ],
)
def test_what_spark_could_not_read_is_a_broken_row(row: tuple[Any, ...], reason: str) -> None:
    good = ("b", 2, 2, 3, 16, bytes(12))
    pixels, broken = decoded(structs([good, row, good]), "crop")
    assert broken.rows.tolist() == [1]
    assert reason in broken.reason
    assert len(pixels) == 2


@every(
    ("size", "kind", "fits"),
    [
        ((8192, 8192), "JPEG", True),
        ((8192, 8193), "JPEG", False),
        ((8192, 4096), "PNG", True),
        ((8192, 4097), "PNG", False),
        ((20_000, 20_000), "PNG", False),
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_limit_is_of_announced_pixels(
    size: tuple[int, int], kind: str, fits: bool, monkeypatch: pytest.MonkeyPatch
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
