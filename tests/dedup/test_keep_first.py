"""Which of near rows is kept, also on executors that are lost."""

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


def test_a_long_chain_takes_no_rounds() -> None:
    """A film: each picture is near the next only."""
    frames = np.arange(200_000)
    found, bits = dropped(frames[:-1], frames[1:], np.ones(len(frames) - 1, np.int64), 1)
    assert found.tolist() == list(range(1, 200_000, 2))
    assert set(bits.tolist()) == {2}
