"""The rows that stay are those of a comparison of all pairs, however the table is cut up."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from every_row import every
from near_rows import ids, kept_of_all_pairs, words_of
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl import NearDuplicates, NearDuplicatesModel
from sparkdl.spark.catalyst.versions import frame_of

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
def test_transform_gives_the_rows_that_stay(model: NearDuplicatesModel, table: DataFrame) -> None:
    words, labels = words_of("dhash")
    for threshold in (0, 4, LARGEST):
        kept = model.copy({model.threshold: threshold}).transform(table)
        assert ids(kept) == kept_of_all_pairs(words, labels, threshold)
        assert kept.columns == table.columns
    assert ids(model.transform(kept)) == ids(kept)


@pytest.mark.nightly
@every("kind", ["ahash", "phash", "whash"])
def test_each_hash_keeps_what_a_comparison_of_all_pairs_keeps(table: DataFrame, kind: str) -> None:
    words, _ = words_of(kind)
    model = NearDuplicates(hash=kind, threshold=6, within=None).fit(table)
    assert ids(model.kept(), "first") == kept_of_all_pairs(words, [0] * 2_000, 6)
    model.unpersist()


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
        assert ids(model.transform(cut)) == wanted
        model.unpersist()


def given(spark: SparkSession, words: list[int | None], **columns: list[object]) -> DataFrame:
    rows = {"id": list(range(len(words))), "image": pa.array(words, pa.int64()), **columns}
    return frame_of(spark, pa.table(rows))


@pytest.mark.nightly
def test_random_tables_of_close_words(spark: SparkSession) -> None:
    """Words of 12 bits, of which nearly all have neighbours, in a few groups and null."""
    for seed in range(2):
        random = np.random.default_rng(seed)
        places = random.choice(64, 12, replace=False)
        small = random.integers(0, 2**12, 300)
        bits = (small[:, None] >> np.arange(12) & 1).astype(np.int64)
        words = (bits << places).sum(axis=1).tolist()
        labels = random.choice(np.array(["a", "b", "", None]), 300).tolist()
        frame = given(spark, words, label=labels).repartition(1 + seed)
        model = NearDuplicates(hash="given", threshold=4).fit(frame)
        for threshold in range(5):
            kept = ids(model.copy({model.threshold: threshold}).kept(), "first")
            assert kept == kept_of_all_pairs(words, labels, threshold), (seed, threshold)
        assert ids(model.transform(frame)) == kept
        model.unpersist()


@pytest.mark.versions
def test_of_a_chain_the_third_row_stays(spark: SparkSession) -> None:
    frame = given(spark, [0b00, 0b01, 0b11])
    model = NearDuplicates(hash="given", threshold=1, within=None, mode="mark").fit(frame)
    marked = model.transform(frame).orderBy("id").select("id", "duplicate_of", "distance")
    assert [tuple(row) for row in marked.collect()] == [(0, None, None), (1, 0, 1), (2, None, None)]


def test_a_row_is_marked_with_the_nearest_that_stays_and_the_first_of_several(
    spark: SparkSession,
) -> None:
    frame = given(spark, [0b0000, 0b1110, 0b0110, 0b0100, 0b0100, -1])
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


@pytest.mark.nightly
def test_a_hundred_thousand_equal_rows_are_one_hash(spark: SparkSession) -> None:
    same = spark.range(100_000).select("id", F.lit(-1).cast("long").alias("image"))
    model = NearDuplicates(hash="given", within=None).fit(same)
    assert (model.found.rows, model.found.different) == (100_000, 1)
    assert ids(model.transform(same)) == [0]
    assert model.keys.comparisons == 0


@pytest.mark.nightly
@every(
    "kind, values",
    [
        ("string", "concat('row ', lpad(id, 4, '0'))"),
        ("date", "date_add(date'2020-02-28', cast(id as int))"),
        ("timestamp", "timestamp_seconds(id)"),
        ("double", "case when id = 3 then double('inf') else id - 1.5 end"),
        ("decimal", "cast(id as decimal(20, 3))"),
        ("binary", "cast(lpad(id, 3, '0') as binary)"),
    ],
)
def test_the_order_may_have_any_type_that_spark_sorts(
    spark: SparkSession, kind: str, values: str
) -> None:
    words = [0, 0, 1, 7, 7, 3]
    frame = given(spark, words).withColumn("first", F.expr(values))
    model = NearDuplicates(hash="given", threshold=1, within=None, keep="first").fit(frame)
    found = ids(model.transform(frame))
    order = [row.id for row in frame.orderBy("first").collect()]
    kept = kept_of_all_pairs([words[row] for row in order], [0] * 6, 1)
    assert found == sorted(order[place] for place in kept), kind
