"""Near pairs of 64-bit words, and which words they leave.

A word is kept if it is near no kept one before it: the lexicographically first maximal independent
set of the graph of near pairs, and not one word of each connected component. Of a chain A-B-C, C
stays if it is near B only.

Only words that share a key are compared, and every pair within a distance shares one. The bits are
dealt to b bands. Two words that differ in at most t bits differ in at most t bands, so they agree
on all bits of some b - t bands, which are the key: the pigeonhole principle. With more bands keys
are more, and longer, so that fewer other pairs share one by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import combinations, count

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

MOST_KEYS = 300
"""Of a word: all words are sorted by each."""
_SORT_COST = 60.0
"""What sorting a word by a key costs, in comparisons of two words."""
_SAMPLE = 20_000
"""Words by which keys are chosen."""
_BITS = (
    np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8)).reshape(-1, 16).sum(axis=1)
)
"""How many bits are 1 in each number of two bytes."""


def decided(rows: DataFrame, tasks: int, threshold: int) -> DataFrame:
    """Say which words each threshold drops.

    Args:
        rows: columns ``group``, ``word``, and ``first``, unique.
        tasks: in how many the groups are decided.
        threshold: the largest.

    Returns:
        The different words of each group: columns ``group``, ``word``, ``first`` (the smallest),
        ``rows`` (how many have it), and ``dropped``, a long whose bit t is 1 if threshold t drops
        the word.
    """
    words = (
        rows.repartition(tasks, "group")
        .groupBy("group", "word")
        .agg(F.min("first").alias("first"), F.count("*").alias("rows"))
    )
    schema = T.StructType([*words.schema.fields, T.StructField("dropped", T.LongType())])
    sorted_words = words.sortWithinPartitions("group", "first")
    return sorted_words.mapInArrow(partial(_decide, threshold), schema)


def _decide(threshold: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for rows, words, groups in _partition(batches):
        earlier, later, distance = near_pairs(words, groups, threshold)
        order = np.argsort(later, kind="stable")
        found, bits = dropped(earlier[order], later[order], distance[order], threshold)
        every = np.zeros(len(words), np.int64)
        every[found] = bits
        yield from rows.append_column("dropped", pa.array(every)).to_batches()


def nearest(rows: DataFrame, kept: DataFrame, threshold: int) -> DataFrame:
    """Find the nearest kept word of each row that is near one, the first of several.

    Args:
        rows: columns ``group``, ``word`` and ``first``.
        kept: likewise; ``group`` and ``word`` are unique together.
        threshold: the largest distance.

    Returns:
        Columns ``first``, ``least``, that of the row's word, ``kept``, that of the nearest word,
        and ``distance``.
    """
    columns = ("group", "word", "first")
    sides = [each.select(*columns, F.lit(n).alias("side")) for n, each in enumerate((rows, kept))]
    both = sides[0].unionByName(sides[1])
    first = both.schema["first"].dataType
    schema = T.StructType().add("first", first).add("least", first).add("kept", first)
    sorted_rows = both.repartition("group").sortWithinPartitions("group", "first")
    return sorted_rows.mapInArrow(partial(_nearest, threshold), schema.add("distance", "integer"))


def _nearest(threshold: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for rows, words, groups in _partition(batches):
        sides = rows["side"].to_numpy()
        once, place = _different(words, groups, sides)
        first, second, distance = near_pairs(words[once], groups[once], threshold, sides[once])
        swapped = sides[once][first] == 1
        mine, kept = np.where(swapped, (second, first), (first, second))
        best = np.lexsort((once[kept], distance, mine))[::-1]  # of each word the last one counts
        nearest_of, apart = np.full(len(once), -1), np.zeros(len(once), np.int32)
        nearest_of[mine[best]], apart[mine[best]] = once[kept[best]], distance[best]
        found = np.flatnonzero((nearest_of[place] >= 0) & (sides == 0))
        ids, near = rows["first"].combine_chunks(), place[found]
        columns = [ids.take(each) for each in (found, once[near], nearest_of[near])]
        names = ["first", "least", "kept", "distance"]
        yield from pa.table([*columns, pa.array(apart[near])], names).to_batches()


def _different(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each different row is first, and for all rows which of these it equals."""
    order = np.lexsort(columns)  # stable
    known = np.stack([each[order] for each in columns])
    starts = np.flatnonzero(np.append(True, (known[:, 1:] != known[:, :-1]).any(axis=0)))
    place = np.empty_like(order)
    place[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    return order[starts], place


def conflicting(words: DataFrame, threshold: int) -> DataFrame:
    """Find the near words of different groups.

    Args:
        words: columns ``group``, ``word``, unique together, and ``first``, unique.
        threshold: the largest distance.

    Returns:
        Of each pair ``row`` and ``other``, the ``first`` of both, of which ``row`` is smaller,
        ``label`` and ``other_label``, their ``group``, and ``distance``.
    """
    first, group = (words.schema[name].dataType for name in ("first", "group"))
    schema = T.StructType().add("row", first).add("label", group)
    schema = schema.add("other", first).add("other_label", group).add("distance", "integer")
    gathered = words.select("group", "word", "first").repartition(1)
    in_order = gathered.sortWithinPartitions("first")
    return in_order.mapInArrow(partial(_conflicting, threshold), schema)


def _conflicting(threshold: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for rows, words, groups in _partition(batches):
        first, second, distance = near_pairs(words, np.zeros_like(groups), threshold, groups)
        sides = [rows[name].take(side) for side in (first, second) for name in ("first", "group")]
        names = ["row", "label", "other", "other_label", "distance"]
        found = pa.Table.from_arrays([*sides, pa.array(distance, pa.int32())], names)
        yield from found.to_batches()


def _partition(
    batches: Iterator[pa.RecordBatch],
) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
    """All rows of a partition, if there are any: with their words, and numbers of their groups."""
    if received := [batch for batch in batches if batch.num_rows]:
        rows = pa.Table.from_batches(received)
        groups = rows["group"].combine_chunks()
        if pa.types.is_floating(groups.type):  # 0.0 and -0.0 are one group in Spark
            groups = pc.add(groups, pa.scalar(0.0, groups.type))
        codes = pc.dictionary_encode(groups, null_encoding="encode").indices
        yield rows, rows["word"].to_numpy(), codes.to_numpy().astype(np.int64)


def near_pairs(
    words: np.ndarray, groups: np.ndarray, threshold: int, sides: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the pairs of words of a group within a Hamming distance.

    Args:
        words: shape (n,), int64.
        groups: only words of the same number are paired, shape (n,), int64.
        threshold: the largest distance, 0 to 63.
        sides: only words of different numbers are paired, shape (n,), integers; None for all.

    Returns:
        The indices of the earlier and of the later word of each pair, once, and their distance;
        each of shape (pairs,).
    """
    found = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))]
    masks = keys_for(words, groups, threshold)
    for place, mask in enumerate(masks):
        keys = words & mask
        order = np.lexsort((keys, groups))
        keys, of, sorted_words = keys[order], groups[order], words[order]
        starts = np.flatnonzero((keys[1:] != keys[:-1]) | (of[1:] != of[:-1])) + 1
        bounds = np.concatenate(([0], starts, [len(words)]))
        ends = np.repeat(bounds[1:], np.diff(bounds))
        left = np.arange(len(words))
        for step in count(1):  # each word with the one so many places further on
            left = left[left + step < ends[left]]
            if not len(left):
                break
            differing = sorted_words[left] ^ sorted_words[left + step]
            distance = bit_count(differing)
            close = np.flatnonzero(distance <= threshold)
            for earlier in masks[:place]:  # a pair counts with the first key that it shares
                close = close[differing[close] & earlier != 0]
            if not len(close):
                continue
            first, second = order[left[close]], order[left[close] + step]
            if sides is not None:
                apart = sides[first] != sides[second]
                first, second, close = first[apart], second[apart], close[apart]
            found.append((first, second, distance[close]))
    first, second, distance = map(np.concatenate, zip(*found, strict=True))
    return first, second, distance


def bit_count(numbers: np.ndarray) -> np.ndarray:
    """How many bits are 1 in each number, uint8, of shape (n,); ``numbers`` are int64."""
    if hasattr(np, "bitwise_count"):
        counts = np.bitwise_count(numbers.view(np.uint64))
    else:  # numpy 1
        counts = _BITS[numbers.view(np.uint16).reshape(-1, 4)].sum(axis=1, dtype=np.uint8)
    return np.asarray(counts)


def keys_for(words: np.ndarray, groups: np.ndarray, threshold: int) -> np.ndarray:
    """Choose the keys that cost least, as a sample of the words says.

    Args:
        words: shape (n,), int64.
        groups: which of them are compared with each other, shape (n,), int64.
        threshold: the largest number of bits in which a pair may differ, 0 to 63.

    Returns:
        The bits of each key, int64. A single 0 compares all words of a group.
    """
    every = slice(None, None, max(len(words) // _SAMPLE, 1))
    sample, of = words[every], groups[every]
    best = np.zeros(1, np.int64)
    least, before = _cost(best, sample, of, len(words)), math.inf
    for number in range(threshold + 1, 65):
        if math.comb(number, threshold) > MOST_KEYS:
            break
        bands = dealt(sample, number)
        keys = [sum(chosen) for chosen in combinations(bands, number - threshold)]
        masks = np.array(keys, np.uint64).view(np.int64)
        cost = _cost(masks, sample, of, len(words))
        if cost >= before:
            break
        before = cost
        if cost < least:
            best, least = masks, cost
    return best


def _cost(masks: np.ndarray, sample: np.ndarray, groups: np.ndarray, number: int) -> float:
    """What finding the near pairs costs, in comparisons of two words."""
    compared = 0.0
    spread = groups * np.int64(-7046029254386353131)  # odd: groups stay apart
    for mask in masks:
        _, counts = np.unique((sample & mask) ^ spread, return_counts=True)
        compared += float((counts * (counts - 1.0)).sum()) / 2
    times = number / max(len(sample), 1)
    return compared * times**2 + number * len(masks) * _SORT_COST


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
