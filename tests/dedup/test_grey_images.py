"""Rows of images become grey ones as Pillow makes them, or a text that says what is wrong."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from near_rows import encoded, png
from PIL import Image, ImageOps

from sparkdl.dedup import pictures
from sparkdl.dedup.hashes import cosine_transform
from sparkdl.dedup.pictures import grey_images
from sparkdl.errors import SetupError

STRUCT = pa.struct(
    [
        ("origin", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("nChannels", pa.int32()),
        ("mode", pa.int32()),
        ("data", pa.binary()),
    ]
)


def colours(height: int = 20, width: int = 31, channels: int = 3) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (height, width, channels), dtype=np.uint8)


def grey(*files: bytes | None) -> list[Any]:
    return list(grey_images(pa.array(files, pa.binary())))


def row(pixels: np.ndarray, **changes: Any) -> dict[str, Any]:
    height, width, channels = pixels.shape
    mode = {1: 0, 3: 16, 4: 24}[channels]
    values = {"height": height, "width": width, "nChannels": channels, "mode": mode}
    return {"origin": "", **values, "data": pixels.tobytes(), **changes}


def structs(*rows: dict[str, Any] | None) -> list[Any]:
    return list(grey_images(pa.array(rows, STRUCT)))


def test_an_image_is_turned_as_its_exif_says() -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = png(Image.fromarray(colours()), exif=exif)
        (found,) = grey(file)
        wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("L")
        assert (found.size, found.tobytes()) == (wanted.size, wanted.tobytes()), orientation


def test_structs_of_spark_have_their_channels_the_other_way_round() -> None:
    blue_first = colours(channels=4)
    red_first = blue_first[..., [2, 1, 0, 3]]
    found = structs(row(blue_first), row(blue_first[..., :3]), row(blue_first[..., :1]), None)
    wanted = [
        Image.fromarray(red_first),
        Image.fromarray(red_first[..., :3]),
        Image.fromarray(blue_first[..., 0]),
    ]
    assert [each.tobytes() for each in found[:3]] == [w.convert("L").tobytes() for w in wanted]
    assert found[3] is None


def test_rows_that_are_no_image_say_why_and_null_stays_null() -> None:
    file = encoded(Image.fromarray(colours()), "PNG")
    none, empty, text, cut, deep = grey(
        None, b"", b"no image", file[: len(file) // 2], encoded(Image.new("F", (3, 3)), "TIFF")
    )
    assert none is None
    for found in (empty, text, deep):
        assert "not one of BMP, GIF, JPEG, PNG, WEBP" in found
    assert "truncated" in cut
    short, floats, absent = structs(
        row(colours(), data=b"123"), row(colours(), mode=21), row(colours(), height=-1, mode=-1)
    )
    assert "has not the bytes of 20 x 31 x 3" in short
    assert "mode 21" in floats
    assert "mode -1" in absent


@pytest.mark.filterwarnings("ignore:Image size")
def test_an_image_that_announces_too_many_pixels_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pictures, "MOST_PIXELS", 600)
    (found,) = grey(png(Image.fromarray(colours())))
    assert "it announces 20 x 31 pixels, and at most 600" in found


def test_a_missing_package_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("PIL.Image", "scipy.fft"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SetupError, match=r"Pillow.*pip install 'sparkdl-torch\[images\]'"):
        grey(b"")
    with pytest.raises(SetupError, match=r"SciPy.*pip install 'sparkdl-torch\[dedup\]'"):
        cosine_transform()
