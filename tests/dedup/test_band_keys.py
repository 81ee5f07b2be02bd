"""Every pair of words within the threshold shares a key, whatever words the keys were made for."""

from __future__ import annotations

import math

import numpy as np
from every_row import every

from sparkdl.dedup.bands import MOST_KEYS, Keys, dealt, keys_for, signed

EVERY_BIT = 2**64 - 1


def words(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63, number, dtype=np.int64)


def margins(number: int) -> np.ndarray:
    """Words of which 48 bits are always the same."""
    return words(number) & np.int64(0x00FF00FF00000000)


def one_group(sample: np.ndarray) -> np.ndarray:
    return np.zeros(len(sample), dtype=np.int64)


@every("threshold", range(32))
def test_words_that_differ_in_any_so_many_bits_share_a_key(threshold: int) -> None:
    random = np.random.default_rng(threshold)
    for sample in (words(500), margins(500), words(0)):
        keys = keys_for(sample, one_group(sample), 10**6, threshold)
        masks = np.array([signed(each) for each in keys.masks], dtype=np.int64)
        for _ in range(50):
            flipped = random.choice(64, threshold, replace=False).tolist()
            difference = np.int64(signed(sum(1 << bit for bit in flipped)))
            assert (difference & masks == 0).any()
        # The bits that are hardest to avoid: one in each band, as far as the threshold goes.
        hit = sum(band & -band for band in keys.bands[:threshold])
        assert (np.int64(signed(hit)) & masks == 0).any()


@every("threshold", (0, 1, 3, 10, 31))
def test_each_bit_is_in_one_band(threshold: int) -> None:
    for number in (threshold + 1, min(threshold + 5, 64)):
        bands = dealt(margins(1000), number)
        assert len(bands) == number
        assert sum(bands) == EVERY_BIT  # no bit twice: the sum would carry
        assert np.bitwise_or.reduce(np.array(bands, dtype=np.uint64)) == EVERY_BIT
        assert all(bands)


def test_bits_that_are_always_the_same_are_spread_over_the_bands() -> None:
    useful = [(band & 0x00FF00FF00000000).bit_count() for band in dealt(margins(1000), 4)]
    assert useful == [4, 4, 4, 4]


def test_what_is_estimated_from_a_sample_is_so_for_all() -> None:
    everything = margins(30_000)
    keys = keys_for(everything[:3_000], one_group(everything[:3_000]), len(everything), 3)
    pairs, fullest = 0.0, 0
    for mask in keys.masks:
        _, counts = np.unique(everything & np.int64(signed(mask)), return_counts=True)
        pairs += float((counts * (counts - 1.0)).sum()) / 2
        fullest = max(fullest, int(counts.max()))
    assert 0.9 < keys.comparisons / pairs < 1.1
    assert 0.5 < keys.fullest / fullest < 2


def test_groups_are_not_compared_with_each_other() -> None:
    sample = margins(3_000)
    together = keys_for(sample, one_group(sample), 100, 2)
    apart = keys_for(sample, np.arange(3_000) % 10, 100, 2)
    assert together.bands == apart.bands
    assert 0.05 < apart.comparisons / together.comparisons < 0.2


def test_more_rows_have_longer_keys_until_there_are_too_many() -> None:
    sample = words(20_000)
    few, many = (keys_for(sample, one_group(sample), rows, 3) for rows in (10**6, 10**9))
    assert (len(few.bands), few.agreeing) == (4, 1)
    assert many.agreeing > 1
    for threshold in range(32):
        keys = keys_for(sample[:100], one_group(sample[:100]), 10**12, threshold)
        assert len(keys.masks) == math.comb(len(keys.bands), threshold) <= MOST_KEYS


def test_the_one_key_of_threshold_0_is_the_word() -> None:
    assert keys_for(words(10), one_group(words(10)), 10, 0).masks == [EVERY_BIT]
    assert Keys((EVERY_BIT,), 1).masks == [EVERY_BIT]


def test_of_no_words_no_pair_is_compared() -> None:
    keys = keys_for(words(0), one_group(words(0)), 0, 4)
    assert f"{keys.comparisons:g} {keys.fullest:g}" == "0 0"  # and not -0
