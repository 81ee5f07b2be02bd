"""Split, standardisation and vocabularies, on a few made-up flights."""

from __future__ import annotations

import math

import pytest
from flights.features import CATEGORIES, FEATURES
from flights.preparation import LARGEST_SCORE, Preparation, Split
from flights.table import require_room
from pyspark.sql import functions as F

from sparkdl.errors import ConfigError

WIDTH = len(FEATURES)


@pytest.fixture(scope="module")
def flights(spark):
    """Twenty flights a month, two carriers in training and a third afterwards."""
    return spark.range(240).select(
        (F.col("id") % 12 + 1).cast("int").alias("month"),
        F.when(F.col("id") % 12 >= 10, "new").when(F.col("id") % 2 == 0, "b").otherwise("a")
        .alias("carrier"),
        F.col("id").cast("int").alias("flight"),
        F.lit("JFK").alias("origin"),
        F.lit("LAX").alias("dest"),
        F.col("id").cast("int").alias("scheduled"),
        F.lit(0.0).alias("label"),
        F.when(F.col("id") % 5 > 0, F.array_repeat(F.col("id").cast("float"), WIDTH))
        .otherwise(F.array_repeat(F.lit(None).cast("float"), WIDTH))
        .alias("known"),
    )  # fmt: skip


def test_the_split_is_by_month_and_leaves_no_flight_in_both_parts(flights):
    split = Split()
    assert split.train(flights).agg(F.max("month")).first()[0] == 10
    assert split.test(flights).agg(F.min("month"), F.max("month")).first()[:] == (11, 12)
    assert split.train(flights).count() + split.test(flights).count() == flights.count()


def test_only_the_training_part_is_learnt_from(flights):
    changed = flights.withColumn(
        "known",
        F.when(F.col("month") > 10, F.array_repeat(F.lit(1e6).cast("float"), WIDTH)).otherwise(
            F.col("known")
        ),
    )
    split = Split()
    learnt = Preparation.learn(split.train(flights))
    again = Preparation.learn(split.train(changed))
    assert again == learnt
    assert learnt.vocabularies == {"carrier": ("a", "b"), "origin": ("JFK",), "dest": ("LAX",)}


@pytest.mark.slow
def test_what_is_learnt_does_not_depend_on_the_order_of_the_sums(flights):
    root = F.array_repeat(F.sqrt("flight").cast("float"), WIDTH)
    roots = flights.withColumn("known", root).persist()
    learnt = [Preparation.learn(roots.repartition(parts)) for parts in (1, 2, 3, 5)]
    assert learnt == [learnt[0]] * 4


def test_unknown_values_become_the_mean_and_unseen_categories_index_zero(flights):
    vocabularies = {"carrier": ("a", "b"), "origin": ("JFK",), "dest": ("LAX",)}
    learnt = Preparation((10.0,) * WIDTH, (4.0,) * WIDTH, vocabularies)
    rows = learnt.apply(flights.where("flight in (0, 1, 2, 10, 239)")).collect()
    assert [row["carrier"] for row in rows] == [2, 1, 2, 0, 0]
    assert [row["origin"] for row in rows] == [1] * 5
    values = [row["numeric"][-1] for row in rows]
    assert values == pytest.approx([0.0, (1 - 10) / 4, (2 - 10) / 4, 0.0, LARGEST_SCORE])
    assert not any(math.isnan(value) for value in values)


def test_a_network_with_too_few_rows_is_refused_with_the_right_sizes():
    vocabularies = dict(zip(CATEGORIES, [("a", "b"), ("JFK",), ("LAX", "SFO")], strict=True))
    learnt = Preparation((), (), vocabularies)
    require_room([2, 1, 2], learnt)
    with pytest.raises(ConfigError, match=r"vocabulary_sizes '\[2, 1, 2\]'"):
        require_room([2, 1, 1], learnt)
