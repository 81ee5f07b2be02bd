"""Keys of 64-bit words such that every pair within a distance has one in common.

The bits are dealt to b bands. Two words that differ in at most t bits differ in at most t bands,
so they agree on all bits of some b - t bands: the pigeonhole principle. With b = t + 1 a key is one
band; with more bands keys are more, and longer, so that fewer pairs share one by chance. All pairs
are found whatever the bands are; a sample decides only how many others are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

MOST_KEYS = 300
"""Of a word: each makes a row of Spark's join."""
_ROW_COST = 40.0
"""What a row of the join costs, in comparisons of two words."""


@dataclass(frozen=True)
class Keys:
    """Which bits of a word make its keys.

    Attributes:
        bands: disjoint sets of bits that are all 64 together, as masks.
        agreeing: how many bands make a key.
        comparisons: the pairs that share a key, estimated, once for each key that they share.
        fullest: the most words that share one key, estimated.
    """

    bands: tuple[int, ...]
    agreeing: int
    comparisons: float = 0.0
    fullest: float = 0.0

    @property
    def chosen(self) -> list[tuple[int, ...]]:
        """The bands of each key."""
        return list(combinations(range(len(self.bands)), self.agreeing))

    @property
    def masks(self) -> list[int]:
        """The bits of each key."""
        return [sum(self.bands[band] for band in bands) for bands in self.chosen]


def keys_for(words: np.ndarray, groups: np.ndarray, rows: int, threshold: int) -> Keys:
    """Choose the keys with which the fewest pairs are compared.

    Args:
        words: a sample, shape (n,), int64.
        groups: which of them are compared with each other, shape (n,), integers.
        rows: how many words there are in all.
        threshold: the largest number of bits in which a pair may differ, 0 to 63.
    """
    best, least = None, math.inf
    for number in range(threshold + 1, 65):
        keys = math.comb(number, threshold)
        if best is not None and keys > MOST_KEYS:
            break
        found = _estimated(dealt(words, number), number - threshold, words, groups, rows)
        cost = found.comparisons + keys * rows * _ROW_COST
        if cost >= least:
            break
        best, least = found, cost
    assert best is not None
    return best


def dealt(words: np.ndarray, bands: int) -> tuple[int, ...]:
    """Deal the 64 bits to bands, so that each distinguishes the words of a sample about as well.

    Bits that are nearly always the same, such as those of a black margin, are spread.
    """
    bits = np.unpackbits(words.astype(">i8").view(np.uint8).reshape(-1, 8), axis=1)
    ones = np.clip(bits.mean(axis=0) if len(bits) else np.full(64, 0.5), 1e-6, 1 - 1e-6)
    entropy = -ones * np.log2(ones) - (1 - ones) * np.log2(1 - ones)
    masks, filled = [0] * bands, [(0.0, 0)] * bands
    for bit in np.argsort(-entropy, kind="stable").tolist():
        band = min(range(bands), key=lambda each: filled[each])
        masks[band] |= 1 << (63 - bit)
        filled[band] = (filled[band][0] + round(float(entropy[bit]), 6), filled[band][1] + 1)
    return tuple(masks)


def signed(mask: int) -> int:
    """64 bits as the signed number that Spark and numpy have for them."""
    return mask - (1 << 64) if mask >> 63 else mask


def _estimated(
    bands: Sequence[int], agreeing: int, words: np.ndarray, groups: np.ndarray, rows: int
) -> Keys:
    keys = Keys(tuple(bands), agreeing)
    share = fullest = 0.0
    pairs = max(len(words) * (len(words) - 1), 1)
    spread = groups.astype(np.int64) * np.int64(-7046029254386353131)  # odd: groups stay apart
    for mask in keys.masks:
        _, counts = np.unique((words & np.int64(signed(mask))) ^ spread, return_counts=True)
        share += float((counts * (counts - 1.0)).sum()) / pairs
        fullest = max(fullest, float(counts.max(initial=0)) / max(len(words), 1))
    every = rows * max(rows - 1.0, 0.0) / 2
    return Keys(tuple(bands), agreeing, share * every, fullest * rows)
