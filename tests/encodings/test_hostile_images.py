"""Images that somebody else wrote: what is not of the declared shape is a broken row, no more."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from functools import cache

import numpy as np
import pictures
import PIL.Image
import pyarrow as pa
import pytest
import torch
from every_row import every
from hypothesis import given
from hypothesis import strategies as st

from sparkdl import encodings
from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.images import FORMATS
from sparkdl.feed.decode import decode
from sparkdl.protocols import ColumnSpec

SPEC = ColumnSpec("i", torch.uint8, (3, 6, 8), encodings.IMAGE)
SPECS = [SPEC, *(replace(SPEC, encoding=each) for each in FITS.values())]
HUGE = 13_000
"""Pixels on a side: 676 MB in memory, below the size at which Pillow itself refuses."""


@cache
def encoded(kind: str) -> bytes:
    """An image of ``SPEC``'s shape."""
    pixels = np.random.default_rng(7).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return pictures.encoded(PIL.Image.fromarray(pixels), kind)


@cache
def moving(kind: str) -> bytes:
    """The same shape in several frames."""
    first, *more = (PIL.Image.new("RGB", (8, 6), colour) for colour in ("red", "green", "blue"))
    return pictures.encoded(first, kind, save_all=True, append_images=more)


def chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def png(*chunks: bytes, side: int = HUGE) -> bytes:
    """The header of a PNG in true colour with alpha, and no pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels


def animated_png() -> bytes:
    """Its first frame is to be cleared when it has been shown."""
    whole = struct.pack(">IIIIIHHBB", 0, HUGE, HUGE, 0, 0, 1, 1, 1, 0)
    return png(chunk(b"acTL", struct.pack(">II", 2, 0)), chunk(b"fcTL", whole))


def png_of_two_minds() -> bytes:
    """First it has the declared size, then another one."""
    small = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 6, 8, 6, 0, 0, 0))
    return animated_png()[:8] + small + animated_png()[8:]


def gif(screen: int, frame: int, extension: bytes = b"") -> bytes:
    control = b"!\xf9\x04" + bytes([0b00001000, 0, 0, 0]) + b"\0"  # clear it afterwards
    descriptor = b"," + struct.pack("<HHHHB", 0, 0, frame, frame, 0)
    header = b"GIF89a" + struct.pack("<HHBBB", screen, screen, 0b10000000, 0, 0) + bytes(6)
    return header + extension + control + descriptor + b"\x02\x02\x44\x01\0;"


def riff(name: bytes, content: bytes) -> bytes:
    size = struct.pack("<I", len(content))
    return b"RIFF" + struct.pack("<I", 12 + len(content)) + b"WEBP" + name + size + content


def extended_webp() -> bytes:
    """A canvas of the largest size around an image of the declared one."""
    canvas = bytes(4) + struct.pack("<I", HUGE - 1)[:3] + struct.pack("<I", HUGE - 1)[:3]
    control = struct.pack("<IH", 0, 0)
    frame = bytes(6) + bytes([7, 0, 0, 5, 0, 0, 9, 0, 0, 0]) + encoded("WEBP")[12:]
    content = bytes([2]) + canvas[1:]
    chunks = b"ANIM" + struct.pack("<I", 6) + control
    chunks += b"ANMF" + struct.pack("<I", len(frame)) + frame
    whole = riff(b"VP8X", content) + chunks
    return whole[:4] + struct.pack("<I", len(whole) - 8) + whole[8:]


def simple_webp(name: bytes) -> bytes:
    """A header of a lossy (``VP8 ``) or lossless (``VP8L``) image, and no pixels."""
    if name == b"VP8 ":
        side = struct.pack("<HH", HUGE, HUGE)
        return riff(name, b"\x10\x02\0\x9d\x01\x2a" + side + bytes(64))
    return riff(name, b"\x2f" + struct.pack("<I", (HUGE - 1) | (HUGE - 1) << 14) + bytes(64))


def bmp() -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, HUGE, HUGE, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 64, 0, 0, 54) + header + bytes(64)


def jpeg() -> bytes:
    octets = bytearray(encoded("JPEG"))
    start = octets.index(b"\xff\xc0") + 5
    octets[start : start + 4] = struct.pack(">HH", HUGE, HUGE)
    return bytes(octets)


def ico() -> bytes:
    inside = png()
    entry = struct.pack("<BBBBHHII", 8, 6, 0, 0, 1, 32, len(inside), 22)
    return struct.pack("<HHH", 0, 1, 1) + entry + inside


def icns() -> bytes:
    inside = png()
    size = struct.pack(">I", len(inside) + 8)
    return b"icns" + struct.pack(">I", len(inside) + 16) + b"ic07" + size + inside


def spider() -> bytes:
    """The first image of a stack that is not there."""
    header = [0.0] * 264
    header[0], header[1], header[4], header[11] = 1.0, 6.0, 1.0, 8.0
    header[12], header[21], header[22] = 33.0, 1056.0, 32.0
    header[26] = 1.0
    return struct.pack("<264f", *header) + bytes(6 * 8 * 4)


def tiff(tags: list[tuple[int, int, int, int]]) -> bytes:
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


HOSTILE: dict[str, bytes] = {
    "a huge PNG": png(),
    "a PNG of the largest size": png(side=2**31 - 1),
    "a huge animated PNG": animated_png(),
    "a PNG with two headers": png_of_two_minds(),
    "a huge GIF": gif(HUGE, HUGE),
    "a GIF of the largest size": gif(65_535, 65_535),
    "a GIF with a huge first frame": gif(8, HUGE),
    "a GIF with a huge frame behind a comment": gif(8, HUGE, b"!\xfe\x03,,,\0"),
    "a GIF that ends in an extension": gif(8, 8)[:21],
    "a WebP of a huge canvas": extended_webp(),
    "a huge lossy WebP": simple_webp(b"VP8 "),
    "a huge lossless WebP": simple_webp(b"VP8L"),
    "a huge BMP": bmp(),
    "a huge JPEG": jpeg(),
    "an ICO with a huge PNG in it": ico(),
    "an ICNS with a huge PNG in it": icns(),
    "an ICNS with an empty block": b"icns" + struct.pack(">I", 16) + b"ic07" + bytes(4),
    "a DDS of no known kind": b"DDS " + struct.pack("<I", 124) + bytes(120),
    "a short DDS": b"DDS " + struct.pack("<I", 124) + b"\1" * 20,
    "a BLP of no known kind": b"BLP2" + struct.pack("<IBBBBII", 99, 1, 0, 8, 0, 8, 6) + bytes(2000),
    "a SPIDER image without its stack": spider(),
    "a TIFF without tags": tiff([]),
    "a TIFF without a size": tiff([(262, 3, 1, 2)]),
    "a TIFF of a tag that it does not hold": tiff([(256, 4, 2**31, 2**31 - 1)]),
    "an EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\n%%EndComments\nshowpage\n",
    "nothing": b"",
}


@every("spec", SPECS)
def test_hostile_bytes_are_a_broken_row_and_the_others_remain(spec: ColumnSpec) -> None:
    good, wrong = encoded("PNG"), {}
    for name, octets in HOSTILE.items():
        decoded = decode(pa.array([good, octets, good]), spec)
        values, broken = decoded.values, decoded.broken
        reason = broken.reason if broken is not None else ""
        told = "is not a valid image" in reason and "0x" not in reason  # an address tells nothing
        if broken is None or broken.rows.tolist() != [1] or not told or len(values) != 2:
            wrong[name] = broken
    assert wrong == {}


def test_every_format_of_the_list_is_read() -> None:
    wrong = []
    for kind in FORMATS:
        expected = np.asarray(PIL.Image.open(io.BytesIO(encoded(kind))).convert("RGB"))
        decoded = decode(pa.array([encoded(kind)]), SPEC)
        pixels = decoded.values.flatten().to_numpy()
        if decoded.broken or not np.array_equal(pixels, expected.transpose(2, 0, 1).ravel()):
            wrong.append(kind)
    assert wrong == []


@pytest.mark.filterwarnings("error")
def test_a_photograph_of_another_size_is_refused_with_both_sizes() -> None:
    photograph = pictures.encoded(PIL.Image.new("RGB", (4_000, 3_000)), "JPEG")
    decoded = decode(pa.array([photograph]), SPEC)
    assert "it has 3000 x 4000 pixels, not 6 x 8" in decoded.broken.reason


def test_of_several_frames_the_first_is_read() -> None:
    wrong = {}
    for kind in ("GIF", "PNG", "WEBP", "MPO"):
        decoded = decode(pa.array([moving(kind)]), SPEC)
        red = decoded.values.flatten().to_numpy().reshape(3, -1).mean(axis=1)
        if decoded.broken or np.abs(red - [255, 0, 0]).max() >= 8:  # JPEG and WebP are lossy
            wrong[kind] = (red, decoded.broken)
    assert wrong == {}


def test_other_formats_are_refused_with_those_that_are_read() -> None:
    kinds = ("ICO", "TIFF", "PPM", "TGA", "PCX")
    broken = {kind: decode(pa.array([encoded(kind)]), SPEC).broken for kind in kinds}
    listed = "BMP, GIF, JPEG, PNG, WEBP"
    assert {kind: b for kind, b in broken.items() if b is None or listed not in b.reason} == {}


@pytest.mark.parametrize("kind", FORMATS)
@given(spec=st.sampled_from(SPECS), data=st.data())
def test_mutated_images_are_pixels_or_broken_rows(
    kind: str, spec: ColumnSpec, data: st.DataObject
) -> None:
    octets = bytearray(data.draw(st.sampled_from([encoded(kind), moving_or_not(kind)])))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(octets) - 1))
        piece = data.draw(st.binary(max_size=8))
        stop = place + data.draw(st.sampled_from([0, len(piece)]))
        octets[place:stop] = piece
    del octets[data.draw(st.sampled_from([len(octets), data.draw(st.integers(0, len(octets)))])) :]
    decoded = decode(pa.array([bytes(octets)], pa.binary()), spec)
    assert len(decoded.values) == (0 if decoded.broken else 1)


def moving_or_not(kind: str) -> bytes:
    return moving({"JPEG": "MPO"}.get(kind, kind)) if kind != "BMP" else encoded(kind)


MEASURE = """
import pickle, re, sys
import pyarrow as pa
from sparkdl.feed.decode import decode

def peaks():
    status = open("/proc/self/status").read()
    return [int(re.search(name + r":\\s+(\\d+)", status)[1]) for name in ("VmPeak", "VmHWM")]

spec, ordinary, hostile = pickle.load(sys.stdin.buffer)
for octets in ordinary:
    assert decode(pa.array([octets]), spec).broken is None
for name, octets in hostile.items():
    before = peaks()
    assert decode(pa.array([octets]), spec).broken is not None
    print(*(after - first for after, first in zip(peaks(), before)), name)
"""


@pytest.mark.gate
@every("spec", SPECS[:2])
def test_what_is_refused_takes_no_memory_for_the_pixels_that_it_claims(spec: ColumnSpec) -> None:
    ordinary = [encoded(kind) for kind in FORMATS] + [moving("MPO")]
    command, given = [sys.executable, "-c", MEASURE], pickle.dumps((spec, ordinary, HOSTILE))
    measured = subprocess.run(command, input=given, capture_output=True, timeout=100)
    assert measured.returncode == 0, measured.stderr.decode()
    lines = [line.split(maxsplit=2) for line in measured.stdout.decode().splitlines()]
    assert len(lines) == len(HOSTILE)
    costly = {name: (int(virtual), int(resident)) for virtual, resident, name in lines}
    assert {name: kb for name, kb in costly.items() if max(kb) > 8 * 1024} == {}
