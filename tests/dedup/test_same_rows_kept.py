"""The rows that stay are those of a comparison of all pairs, however the table is cut up."""

from __future__ import annotations

import pyarrow as pa
import pytest
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
