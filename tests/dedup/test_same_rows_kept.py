"""Near rows that stay: those of a comparison of all pairs, however the table is cut up."""

from __future__ import annotations

import os
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from near_rows import bits_apart, ids, kept_of_all_pairs, words_of
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl import NearDuplicates, NearDuplicatesModel
from sparkdl.dedup.pairs import dropped
from sparkdl.spark.catalyst.versions import frame_of


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


def test_deciding_takes_little_memory_beside_the_pairs() -> None:
    """A star: one word near all others, in a million pairs of 24 bytes."""
    first, others = np.zeros(1_000_000, np.int64), np.arange(1, 1_000_001) % 7 + 1
    near = np.ones_like(others)
    tracemalloc.start()
    dropped(first, others, near, 1)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


LARGEST = 10


@pytest.fixture(scope="module")
def model(table: DataFrame) -> NearDuplicatesModel:
    return NearDuplicates(threshold=LARGEST).fit(table)


@pytest.mark.nightly
def test_every_threshold_keeps_what_a_comparison_of_all_pairs_keeps(
    model: NearDuplicatesModel,
) -> None:
    words, labels = words_of("dhash")
    for threshold in range(LARGEST + 1):
        wanted = kept_of_all_pairs(words, labels, threshold)
        found = ids(model.copy({model.threshold: threshold}).kept(), "first")
        assert found == wanted, threshold
    assert model.found.rows == 2_000
    assert model.found.different == len(set(zip(words, labels, strict=True)))


@pytest.mark.nightly
def test_the_same_rows_stay_however_the_table_is_cut_up(table: DataFrame) -> None:
    words, labels = words_of("dhash")
    wanted = kept_of_all_pairs(words, labels, 4)
    cuts = [
        table.repartition(1),
        table.repartition(7, "name"),
        table.orderBy(F.desc("label")),
        table.repartitionByRange(5, "id"),
        table.coalesce(1).union(table.limit(0)),
    ]
    for cut in cuts:
        model = NearDuplicates().fit(cut)
        kept = model.transform(cut)
        assert (ids(kept), kept.columns) == (wanted, cut.columns)
        model.words.unpersist()


def of_words(spark: SparkSession, words: list[int | None], **columns: list[object]) -> DataFrame:
    rows = {"id": list(range(len(words))), "image": pa.array(words, pa.int64()), **columns}
    return frame_of(spark, pa.table(rows))


@pytest.mark.versions
def test_of_a_chain_the_third_row_stays(spark: SparkSession) -> None:
    frame = of_words(spark, [0b00, 0b01, 0b11])
    model = NearDuplicates(hash="given", threshold=1, within=None, mode="mark").fit(frame)
    marked = model.transform(frame).orderBy("id").select("id", "duplicate_of", "distance")
    assert [tuple(row) for row in marked.collect()] == [(0, None, None), (1, 0, 1), (2, None, None)]


def test_a_row_is_marked_with_the_nearest_that_stays_and_the_first_of_several(
    spark: SparkSession,
) -> None:
    frame = of_words(spark, [0b0000, 0b1110, 0b0110, 0b0100, 0b0100, -1])
    model = NearDuplicates(hash="given", threshold=2, within=None, mode="mark").fit(frame)
    marked = model.transform(frame).orderBy("id").select("duplicate_of", "distance")
    assert [tuple(row) for row in marked.collect()] == [
        (None, None),  # 0000
        (None, None),  # 1110, three bits away
        (1, 1),  # 0110, two bits from the first, one from the second
        (0, 1),
        (0, 1),
        (None, None),
    ]


def test_what_spark_takes_for_one_group_is_one(spark: SparkSession) -> None:
    groups = [0.0, -0.0, float("nan"), float("nan"), None, None]
    frame = of_words(spark, [0, 0, 0, 0, 0, 0], label=pa.array(groups, pa.float64()))
    model = NearDuplicates(hash="given").fit(frame.where("id % 2 = 0"))
    assert ids(model.duplicates(frame)) == [1, 3, 5]


@pytest.mark.nightly
def test_a_hundred_thousand_equal_rows_are_one_hash(spark: SparkSession) -> None:
    same = spark.range(100_000).select("id", F.lit(-1).cast("long").alias("image"))
    model = NearDuplicates(hash="given", within=None).fit(same)
    assert (model.found.rows, model.found.different) == (100_000, 1)
    assert ids(model.transform(same)) == [0]


THRESHOLD = 6


def dying(frame: DataFrame, token: Path) -> DataFrame:
    """The same rows, of which one partition takes its executor along for each token there is."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if 0 in batch["id"].to_pylist():
                try:
                    token.unlink()
                except FileNotFoundError:
                    yield batch
                    continue
                # A Python worker is a child of the daemon, which is a child of the executor.
                executor = int(Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])
                os.kill(executor, signal.SIGKILL)
            yield batch

    return frame.mapInArrow(rows, frame.schema)


@pytest.mark.nightly
def test_an_executor_that_dies_changes_no_row_that_stays(
    spark: SparkSession, table: DataFrame, tmp_path: Path
) -> None:
    words, labels = words_of("dhash")
    wanted = kept_of_all_pairs(words, labels, THRESHOLD)
    token = tmp_path / "token"
    rows = dying(table, token)

    token.touch()
    model = NearDuplicates(threshold=THRESHOLD).fit(rows)
    assert not token.exists()
    assert ids(model.kept(), "first") == wanted

    token.touch()  # the hashes that this executor has persisted are lost with it
    assert ids(model.transform(rows)) == wanted
    assert not token.exists()
    assert ids(model.kept(), "first") == wanted
    model.words.unpersist()
