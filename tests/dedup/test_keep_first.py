"""Of near words, each stays that is near no kept one before it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from near_rows import bits_apart, kept_of_all_pairs

from sparkdl.dedup.pairs import dropped


def kept(words: np.ndarray, threshold: int) -> list[list[int]]:
    """Which rows each threshold from 1 keeps, of different words in their order."""
    distance = bits_apart(words[:, None], words[None, :])
    later, earlier = np.nonzero(np.tril(distance <= threshold, -1))  # sorted by the later one
    found, bits = dropped(words[earlier], words[later], distance[later, earlier], threshold)
    by_word = dict(zip(found.tolist(), bits.tolist(), strict=True))
    return [
        [row for row, word in enumerate(words.tolist()) if not by_word.get(word, 0) >> limit & 1]
        for limit in range(1, threshold + 1)
    ]


@given(st.lists(st.integers(-128, 127), unique=True, max_size=60), st.integers(1, 4))
def test_it_is_what_comparing_every_pair_keeps(words: list[int], threshold: int) -> None:
    wanted = [kept_of_all_pairs(words, [0] * len(words), t) for t in range(1, threshold + 1)]
    assert kept(np.array(words, dtype=np.int64), threshold) == wanted


def test_a_chain_keeps_every_second_word() -> None:
    chain = np.array([(1 << length) - 1 for length in range(9)], dtype=np.int64)
    assert kept(chain, 1) == [[0, 2, 4, 6, 8]]


def test_a_word_between_two_kept_ones_goes_though_it_came_last() -> None:
    assert kept(np.array([0b00, 0b11, 0b01], dtype=np.int64), 1) == [[0, 1]]


def test_a_larger_threshold_may_keep_what_a_smaller_one_drops() -> None:
    words = np.array([0b0000, 0b0011, 0b0111], dtype=np.int64)
    assert kept(words, 2) == [[0, 1], [0, 2]]


def test_a_long_chain_takes_no_rounds() -> None:
    """A film: each picture is near the next only."""
    frames = np.arange(200_000)
    found, bits = dropped(frames[:-1], frames[1:], np.ones(len(frames) - 1, np.int64), 1)
    assert found.tolist() == list(range(1, 200_000, 2))
    assert set(bits.tolist()) == {2}
