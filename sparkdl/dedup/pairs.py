"""Near pairs of words, by plain SQL joins on their keys, and which words they leave.

A word is kept if it is near no kept one before it: the lexicographically first maximal independent
set of the graph of near pairs, and not one word of each connected component. Of a chain A-B-C, C
stays if it is near B only.

Keys of 64-bit words such that every pair within a distance has one in common.

The bits are dealt to b bands. Two words that differ in at most t bits differ in at most t bands,
so they agree on all bits of some b - t bands: the pigeonhole principle. With b = t + 1 a key is one
band; with more bands keys are more, and longer, so that fewer pairs share one by chance. All pairs
are found whatever the bands are; a sample decides only how many others are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

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


def near(left: DataFrame, right: DataFrame, keys: Keys, threshold: int, where: str) -> DataFrame:
    """Pairs of a word of each side within a Hamming distance, each once.

    Args:
        left: has a column ``word``; it is ``a`` from here on.
        right: likewise, ``b``.
        keys: made for this threshold or a larger one.
        threshold: the largest distance.
        where: what else must hold of a pair, in SQL.

    Returns:
        All columns of both, and ``distance``.
    """
    distance = "bit_count(a.word ^ b.word)"
    pairs = (
        _keyed(left, keys)
        .alias("a")
        .join(
            _keyed(right, keys).alias("b"),
            F.expr(
                f"a.place = b.place and a.key = b.key and {where} "
                f"and {distance} <= {threshold} and {_is_first_shared(keys)}"
            ),
        )
    )
    return pairs.withColumn("distance", F.expr(distance))


def _keyed(words: DataFrame, keys: Keys) -> DataFrame:
    """A row for each key of each word."""
    each = ", ".join(f"word & {_long(mask)}" for mask in keys.masks)
    return words.selectExpr("*", f"posexplode(array({each})) as (place, key)")


def _is_first_shared(keys: Keys) -> str:
    """Whether no earlier key is shared too: of the bands that agree, the first ones make it."""
    agree = " | ".join(
        f"if((a.word ^ b.word) & {_long(band)} = 0L, {_long(1 << index)}, 0L)"
        for index, band in enumerate(keys.bands)
    )
    chosen = [sum(1 << band for band in bands) for bands in keys.chosen]
    up_to_last = [(2 << max(bands)) - 1 for bands in keys.chosen]
    return f"({agree}) & {_at_place(up_to_last)} = {_at_place(chosen)}"


def _at_place(numbers: list[int]) -> str:
    return f"element_at(array({', '.join(map(_long, numbers))}), a.place + 1)"


def _long(bits: int) -> str:
    return f"{signed(bits)}L"


def decided(words: DataFrame, keys: Keys, threshold: int) -> DataFrame:
    """Say which words each threshold drops.

    Args:
        words: columns ``group``, ``word``, unique together, and ``first``, unique.
        keys: made for this threshold.
        threshold: the largest.

    Returns:
        The same with a column ``dropped``, a long whose bit t is 1 if threshold t drops the word.
    """
    before, same = "a.first < b.first", "a.group <=> b.group and a.word < b.word"
    pairs = near(words, words, keys, threshold, same).select(
        F.col("a.group").alias("group"),
        F.expr(f"if({before}, a.word, b.word)").alias("earlier"),
        F.expr(f"if({before}, b.word, a.word)").alias("later"),
        F.expr(f"if({before}, b.first, a.first)").alias("order"),
        "distance",
    )
    sorted_pairs = pairs.repartition("group").sortWithinPartitions("group", "order")
    kind = words.schema["group"]
    schema = T.StructType(
        [kind, T.StructField("word", T.LongType()), T.StructField("dropped", T.LongType())]
    )
    found = sorted_pairs.drop("order").mapInArrow(partial(_decide, threshold), schema)
    joined = words.alias("w").join(
        found.alias("f"), F.expr("w.group <=> f.group and w.word = f.word"), "left"
    )
    return joined.select("w.*", F.expr("coalesce(f.dropped, 0L)").alias("dropped"))


def _decide(threshold: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decide for each group of a partition, whose pairs follow each other."""
    received = [batch for batch in batches if batch.num_rows]
    if not received:
        return
    pairs = pa.Table.from_batches(received)
    del received
    groups = pairs["group"].combine_chunks()
    codes = pc.dictionary_encode(groups, null_encoding="encode").indices.to_numpy()
    earlier, later, distance = (pairs[n].to_numpy() for n in ("earlier", "later", "distance"))
    changes = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    for start, end in pairwise([0, *changes.tolist(), len(codes)]):
        one = slice(start, end)
        words, bits = dropped(earlier[one], later[one], distance[one], threshold)
        group = groups.take(pa.array(np.full(len(words), start)))
        yield pa.RecordBatch.from_arrays(
            [group, pa.array(words), pa.array(bits)], ["group", "word", "dropped"]
        )


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
    bits: dict[int, int] = {}
    every = (2 << threshold) - 1
    # Through memoryviews: lists of all pairs would take several times as much memory.
    for first, word, apart in zip(earlier.data, later.data, distance.data, strict=True):
        # All pairs have been met in which the first one might have been dropped.
        if drops := every & (-1 << apart) & ~bits.get(first, 0):
            bits[word] = bits.get(word, 0) | drops
    return np.array([*bits], dtype=np.int64), np.array([*bits.values()], dtype=np.int64)
