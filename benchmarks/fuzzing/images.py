"""Encoded images in every likely format, and Spark's own image structs."""

from __future__ import annotations

import io
import random
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image, features

from fuzzing.loop import Fault, Target
from fuzzing.mutation import mutated_bytes, number_of_changes
from sparkdl import encodings
from sparkdl.errors import SparkDLError
from sparkdl.protocols import ColumnSpec

FORMATS = (
    *("PNG", "JPEG", "GIF", "BMP", "TIFF", "ICO", "ICNS", "WEBP", "PPM", "TGA", "DDS", "PCX"),
    *("SGI", "SPIDER", "JPEG2000", "IM", "MSP", "XBM", "DIB", "BLP", "QOI", "AVIF", "MPO", "EPS"),
)
SIZE = 16
PIXELS = pa.struct(
    [
        pa.field("origin", pa.string()),
        pa.field("height", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("nChannels", pa.int32()),
        pa.field("mode", pa.int32()),
        pa.field("data", pa.binary()),
    ]
)


class ImagesTarget(Target):
    """A few rows of images, one of them intact: that one has to be among those decoded."""

    name = "images"
    reads = (
        "encodings/images.py",
        "encodings/pixels.py",
        "encodings/encoding.py",
    )
    deadline_s = 10.0

    def __enter__(self) -> ImagesTarget:
        noise = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        self._noise = noise
        self._files = [file for name in FORMATS for file in _files_of(name, noise)]
        if not features.check("zlib") or len(self._files) < 8:
            raise Fault("this Pillow can hardly write anything")
        huge = Image.new("1", (12_000, 12_000))
        file = io.BytesIO()
        huge.save(file, "PNG")
        self._files.append(file.getvalue())
        whole = io.BytesIO()
        Image.fromarray(noise).save(whole, "PNG")
        self._whole = whole.getvalue()
        return self

    def attempt(self, draw: random.Random) -> bool:
        """One column of three rows."""
        spec = ColumnSpec(
            "x", torch.uint8, (draw.choice([3, 3, 3, 1, 4]), SIZE, SIZE), encodings.IMAGE
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd files
            return self._pixels(draw) if draw.random() < 0.2 else self._encoded(draw, spec)

    def _encoded(self, draw: random.Random, spec: ColumnSpec) -> bool:
        rows = [
            mutated_bytes(draw, draw.choice(self._files), number_of_changes(draw)) for _ in range(2)
        ]
        try:
            values, broken = encodings.IMAGE.decode(
                pa.array([*rows, self._whole]), spec.row_shape, spec.dtype
            )
        except SparkDLError as error:
            raise Fault("one image that cannot be read ended the reading") from error
        wrong = 0 if broken is None else len(broken.rows)
        if len(values) + wrong != 3 or (broken is not None and 2 in broken.rows):
            raise Fault(f"{len(values)} rows were decoded and {wrong} not, of 3 with one whole")
        if spec.row_shape[0] == 3:
            found = np.array(values[len(values) - 1].as_py()).reshape(3, SIZE, SIZE)
            if not np.array_equal(found, self._noise.transpose(2, 0, 1)):
                raise Fault("an image beside broken ones was decoded to something else")
        return broken is None

    @staticmethod
    def _pixels(draw: random.Random) -> bool:
        spec = ColumnSpec("x", torch.uint8, (3, 2, 2), encodings.PIXELS)
        good: dict[str, Any] = {
            **{"origin": "a", "height": 2, "width": 2, "nChannels": 3, "mode": 16},
            "data": bytes(range(12)),
        }
        odd: dict[str, list[Any]] = {
            "data": [b"", bytes(11), bytes(13), None, bytes(1000)],
            "origin": [None, "é"],
        }
        rows = [dict(good) for _ in range(3)]
        for row in rows[:2]:
            if draw.random() < 0.6:
                key = draw.choice(list(good))
                numbers = [0, -1, None, 3, (1 << 31) - 1, -(1 << 31), 24]
                row[key] = draw.choice(odd.get(key, numbers))
        values, broken = encodings.PIXELS.decode(pa.array(rows, PIXELS), spec.row_shape, spec.dtype)
        wrong = 0 if broken is None else len(broken.rows)
        if len(values) + wrong != 3 or (broken is not None and 2 in broken.rows):
            raise Fault(f"{len(values)} rows were decoded and {wrong} not, of 3 with one whole")
        return broken is None


def _files_of(name: str, noise: np.ndarray) -> list[bytes]:
    """An image in a format, in the modes in which this Pillow can write it."""
    made = []
    for mode in ("RGB", "L", "P", "RGBA", "I;16", "1", "F", "CMYK"):
        file = io.BytesIO()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of formats that Pillow will drop
                Image.fromarray(noise).convert(mode).save(file, name)
        except (OSError, ValueError, KeyError):  # not in this mode, or not at all
            continue
        made.append(file.getvalue())
    return made
