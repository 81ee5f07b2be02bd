"""A number that tells one set of rows from another, whatever the order in which they are read.

Each row's bytes, as they are fed, are hashed to 64 bits; the hashes of all rows are added modulo
2^64. So the sum is the same for any partitioning, record batches and number of workers, and a row
that is there twice counts twice. It is no secret and withstands no attack: it is for rows of
another day, not for forged ones.

The hashes themselves put rows into one order, whatever the order in which they arrive: rows of the
same hash have, almost surely, the same bytes, and it makes no difference which comes first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from sparkdl.feed.schema import Column, Ragged

MODULUS = 1 << 64
BLOCK_WORDS = 1 << 15
"""How much is worked on at a time, in words of 8 bytes: small beside a processor's cache."""
SEED = 20
"""Of the factors. With another one, every checkpoint that there is would be one of other rows."""

_HALF = np.uint64(32)
_ACROSS = np.uint64(29)
"""By how many bits a word is shifted to be mixed with itself. The sign of a number may be its
highest bit, of which a product keeps nothing else: two signs in a row would cancel. Not half a
word, where the next number has its sign."""


def fingerprint(columns: Sequence[Column]) -> int:
    """The sum of the hashes of some rows.

    Args:
        columns: as ``row_hashes`` takes them.

    Returns:
        0 <= sum < 2^64; those of several calls are to be added modulo 2^64.
    """
    return int(row_hashes(columns).sum(dtype=np.uint64))


def row_hashes(columns: Sequence[Column], *, may_hold_nan: bool = True) -> np.ndarray:
    """The hash of each of some rows.

    Args:
        columns: of the same number of rows, tensors of shape (n, ...) or ragged, any dtype; always
            the same ones in the same order. 0.0 and -0.0 are different values.
        may_hold_nan: whether to look for NaN, of which there are many: all count as one.

    Returns:
        Shape (n,), uint64.
    """
    rows = len(columns[0])
    total = np.full(rows, 1, np.uint64)
    for index, column in enumerate(columns):
        if isinstance(column, Ragged):
            total += _ragged_sums(column, index, may_hold_nan=may_hold_nan)
            continue
        if may_hold_nan and column.is_floating_point():
            column = column.masked_fill(column.isnan(), torch.nan)
        if column.numel():
            raw = column.reshape(rows, -1).contiguous().view(torch.uint8).numpy()
            total += weighted_sums(raw, odd_factors(index, -(-raw.shape[1] // 8)))
    # All bits of the result are to depend on the upper bits of a row's sum, and on the lower ones.
    total ^= total >> _HALF
    total *= np.uint64(0x9FB21C651E98DF25)
    total ^= total >> _HALF
    total *= np.uint64(0xD6E8FEB86659FD93)
    total ^= total >> _HALF
    return total


def _ragged_sums(column: Ragged, index: int, *, may_hold_nan: bool) -> np.ndarray:
    """The same of rows of unequal length: each number is a word, and the length is one more.

    Returns:
        Shape (rows,), uint64.
    """
    values, lengths = column.values, column.lengths.numpy()
    if may_hold_nan and values.is_floating_point():
        values = values.masked_fill(values.isnan(), torch.nan)
    counts = lengths * math.prod(values.shape[1:])
    longest = int(counts.max()) if len(counts) else 0
    # A power of two of them, so that few arrays are kept: the first ones are always the same.
    factors = odd_factors(index, 1 << longest.bit_length())
    sums: np.ndarray = lengths.astype(np.uint64) * factors[0]
    if not longest:
        return sums
    raw = values.contiguous().view(-1).view(torch.uint8).numpy()
    words = raw.view(f"u{values.element_size()}").astype(np.uint64)
    words ^= words >> _ACROSS
    ends = np.cumsum(counts)
    within = np.arange(1, ends[-1] + 1)
    within -= np.repeat(ends - counts, counts)
    words *= factors[within]
    filled = counts > 0  # reduceat would give an empty row the next one's first word
    sums[filled] += np.add.reduceat(words, (ends - counts)[filled])
    return sums


def weighted_sums(raw: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """The sum of each row's words, each times a factor of its own.

    Args:
        raw: shape (rows, bytes), uint8.
        factors: odd, so that no change of one word is lost; shape (words,), uint64.

    Returns:
        Shape (rows,), uint64.
    """
    rows, size = raw.shape
    if size in (1, 2, 4, 8):
        single: np.ndarray = raw.view(f"u{size}")[:, 0].astype(np.uint64)
        single ^= single >> _ACROSS
        single *= factors[0]
        return single
    words = len(factors)
    step = max(1, BLOCK_WORDS // words)
    mixed, sums = np.empty((min(step, rows), words), np.uint64), np.empty(rows, np.uint64)
    padded = None if size == 8 * words else np.zeros((len(mixed), 8 * words), np.uint8)
    for start in range(0, rows, step):
        block = raw[start : start + step]
        if padded is not None:
            padded[: len(block), :size] = block
            block = padded[: len(block)]
        values, out = block.view(np.uint64), mixed[: len(block)]
        np.right_shift(values, _ACROSS, out=out)
        np.bitwise_xor(values, out, out=out)
        np.einsum("ij,j->i", out, factors, out=sums[start : start + step])
    return sums


@functools.lru_cache(maxsize=256)
def odd_factors(column: int, words: int) -> np.ndarray:
    """Factors for ``weighted_sums``: the same in every process, others for each column."""
    # Raw draws of this generator are the same in every version of numpy.
    draws = np.random.Philox(key=[SEED, column]).random_raw(words)
    factors: np.ndarray = np.asarray(draws, np.uint64) | np.uint64(1)
    return factors
