"""Hashes of images have the bits of the imagehash package, and tell near images from others."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
from every_row import every
from near_rows import IMAGEHASH, bits_apart, digits, encoded, png, word
from PIL import Image

from sparkdl import NearDuplicates
from sparkdl.dedup.hashing import hash_rows

KINDS = list(IMAGEHASH)


def hashes(kind: str, files: list[bytes]) -> list[int | None]:
    words, _ = hash_rows(kind, pa.array(files, pa.binary()))
    return words.to_pylist()


def natural(seed: int, size: tuple[int, int]) -> Image.Image:
    """Smooth colours, as photographs have, of few pixels enlarged."""
    few = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(few).resize(size, Image.Resampling.BICUBIC)


def hard() -> list[Image.Image]:
    """One colour, symmetric, smaller than a hash, long: where bits hang on ties."""
    images = [Image.new("L", size, c) for size in ((1, 1), (8, 8), (640, 480)) for c in (0, 7, 255)]
    for side in (64, 100, 257):
        box = np.zeros((side, side), np.uint8)
        box[side // 4 : -side // 4, side // 3 : -side // 3] = 200
        slope = np.tile(np.arange(side) % 256, (side, 1)).astype(np.uint8)
        images += [Image.fromarray(each) for each in (box, slope, slope.T.copy())]
    random = np.random.default_rng(3)
    for width, height in ((3, 5), (900, 11), (31, 33), (1100, 1030)):
        noise = random.integers(0, 256, (height, width), dtype=np.uint8)
        images.append(Image.fromarray(noise))
    return images


@every("kind", KINDS)
def test_the_bits_are_those_of_imagehash(kind: str) -> None:
    images = [Image.fromarray(pixels) for pixels in digits(400)[0]] + hard()
    images += [natural(seed, (160 + 7 * seed, 200 - 5 * seed)) for seed in range(12)]
    assert hashes(kind, [png(each) for each in images]) == [word(each, kind) for each in images]


@every("kind", KINDS)
def test_an_image_of_any_mode_and_format_has_the_bits_that_it_has_in_grey(kind: str) -> None:
    image = natural(1, (120, 90))
    files = [
        *(png(image.convert(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        encoded(image, "JPEG", quality=60),
        encoded(image.convert("CMYK"), "JPEG"),
        encoded(image, "BMP"),
        encoded(image, "WEBP", lossless=True),
        encoded(image, "GIF"),
    ]
    wanted = [word(Image.open(io.BytesIO(each)), kind) for each in files]
    assert hashes(kind, files) == wanted


@every("kind", KINDS)
def test_brighter_images_and_jpegs_are_near_and_other_images_are_not(kind: str) -> None:
    images = [natural(seed, (240, 180)) for seed in range(20)]
    plain = hashes(kind, [png(each) for each in images])
    brighter = [
        png(each.point([min(255, round(v * 1.01)) for v in range(256)] * 3)) for each in images
    ]
    compressed = [encoded(each, "JPEG", quality=50) for each in images]
    smaller = [png(each.resize((120, 90))) for each in images]
    for changed in (brighter, compressed, smaller):
        assert bits_apart(hashes(kind, changed), plain).max() <= NearDuplicates().getThreshold()
    others = bits_apart(plain, plain[1:] + plain[:1])
    assert 28 < others.mean() < 36
    assert others.min() > 10


def test_the_words_of_a_batch_do_not_depend_on_its_other_rows() -> None:
    files = [png(natural(seed, (100, 80))) for seed in range(5)]
    for kind in KINDS:
        assert hashes(kind, files) == [hashes(kind, [each])[0] for each in files]
        assert hashes(kind, []) == []
