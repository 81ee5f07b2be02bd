"""Pictures that are nearly equal, and what is kept of them by comparing every pair."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import imagehash
import numpy as np
from pictures import encoded
from PIL import Image
from pyspark.sql import DataFrame
from sklearn.datasets import load_digits

IMAGEHASH = {
    "ahash": imagehash.average_hash,
    "dhash": imagehash.dhash,
    "phash": imagehash.phash,
    "whash": imagehash.whash,
}


def png(image: Image.Image, **options: Any) -> bytes:
    return encoded(image, "PNG", **options)


def word(image: Image.Image, kind: str) -> int:
    """The hash of the imagehash package, as a signed number."""
    bits = int(str(IMAGEHASH[kind](image)), 16)
    return bits - 2**64 if bits >= 2**63 else bits


@cache
def digits(number: int) -> tuple[list[np.ndarray], list[int]]:
    """Handwritten digits of 32 x 32 grey pixels and their labels; a quarter are near copies."""
    source, random = load_digits(), np.random.default_rng(7)
    originals = number - number // 4
    chosen = np.concatenate([np.arange(originals), random.integers(originals, size=number // 4)])
    images = []
    for place, index in enumerate(chosen.tolist()):
        image = Image.fromarray((source.images[index] * 15.9).astype(np.uint8))
        pixels = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
        if place >= originals:
            pixels = pixels + random.integers(-12, 13, pixels.shape)
        images.append(pixels.clip(0, 255).astype(np.uint8))
    return images, source.target[chosen].tolist()


def words_of(kind: str) -> tuple[list[int], list[int]]:
    """The hashes and labels of 2,000 digits."""
    images, labels = digits(2_000)
    return [word(Image.fromarray(pixels), kind) for pixels in images], labels


def ids(frame: DataFrame, name: str = "id") -> list[int]:
    """The values of a column of numbers, in their order."""
    return sorted(row[0] for row in frame.select(name).collect())


def bits_apart(first: Any, second: Any) -> np.ndarray:
    """Of signed words, without numpy 2's function, which numpy 1 lacks."""
    different = np.asarray(first, dtype=np.int64) ^ np.asarray(second, dtype=np.int64)
    ones = np.array([each.bit_count() for each in range(256)])
    return ones[different[..., None].view(np.uint8)].sum(axis=-1)


def kept_of_all_pairs(
    words: Sequence[int], groups: Sequence[Hashable], threshold: int
) -> list[int]:
    """Which rows, in their order, are within a distance of no earlier kept one of their group."""
    kept: dict[Hashable, list[int]] = {}
    for row, (each, group) in enumerate(zip(words, groups, strict=True)):
        if not (bits_apart([words[k] for k in kept.get(group, [])], each) <= threshold).any():
            kept.setdefault(group, []).append(row)
    return sorted(row for rows in kept.values() for row in rows)
