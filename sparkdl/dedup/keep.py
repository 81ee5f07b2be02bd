"""Which of many near words are kept: each that is near no kept one before it.

This is the lexicographically first maximal independent set of the graph of near pairs, and not one
word of each connected component: of a chain A-B-C, C stays if it is near B only.
"""

from __future__ import annotations

import numpy as np


def dropped(
    earlier: np.ndarray, later: np.ndarray, distance: np.ndarray, threshold: int
) -> tuple[np.ndarray, np.ndarray]:
    """Decide for every threshold up to one.

    It takes time and memory in proportion to the pairs, whatever graph they are.

    Args:
        earlier: the word of each near pair that comes first in the order of all, shape (pairs,).
        later: the other word, shape (pairs,), by which the pairs are sorted in that order.
        distance: in how many bits they differ, shape (pairs,).
        threshold: the largest distance.

    Returns:
        Words that are dropped at some threshold, and for each a number whose bit t says whether
        threshold t drops it; both of shape (dropped,), int64.
    """
    words, ids = np.unique(np.concatenate([earlier, later]), return_inverse=True)
    before, after = ids[: len(earlier)], ids[len(earlier) :]
    # Words that are never the later one come first, in any order; the others as they appear.
    place = np.zeros(len(words), dtype=np.int64)
    met, first_at = np.unique(after, return_index=True)
    place[met] = first_at + 1
    by_place = np.argsort(place, kind="stable")
    rank = np.empty_like(by_place)
    rank[by_place] = np.arange(len(words))
    before, after = rank[before], rank[after]
    by_first = np.argsort(before, kind="stable")
    before, after, distance = before[by_first], after[by_first], distance[by_first]
    bits = np.zeros(len(words), dtype=np.int64)
    for limit in range(1, threshold + 1):
        near = distance <= limit
        gone = _near_a_kept_one(before[near], after[near], len(words))
        bits |= gone.astype(np.int64) << limit
    found = bits != 0
    return words[by_place][found], bits[found]


def _near_a_kept_one(before: np.ndarray, after: np.ndarray, number: int) -> np.ndarray:
    """Which of the words 0, 1, ... are dropped, by pairs that are sorted by the first word."""
    gone = np.zeros(number, dtype=bool)
    view = gone.data  # reads one far faster than numpy does
    first, starts = np.unique(before, return_index=True)
    ends = np.append(starts, len(before))[1:]
    for word, start, end in zip(first.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if not view[word]:
            gone[after[start:end]] = True
    return gone
