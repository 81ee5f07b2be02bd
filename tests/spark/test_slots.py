"""How many workers a cluster can run at once."""

from __future__ import annotations

import pytest
from frames import estimator, frame
from pyspark.sql import SparkSession

from sparkdl.errors import ConfigError
from sparkdl.spark import slots
from sparkdl.spark.partitions import known_partitions
from sparkdl.spark.slots import choose_num_workers, count_slots, require_free_slots


def test_slots_are_the_cores_of_all_executors(spark: SparkSession) -> None:
    assert count_slots(spark) == 3


def test_no_wish_means_every_slot(spark: SparkSession) -> None:
    assert choose_num_workers(spark, None) == 3


def test_a_wish_within_the_slots_is_granted(spark: SparkSession) -> None:
    assert [choose_num_workers(spark, wanted) for wanted in (1, 2, 3)] == [1, 2, 3]


def test_a_wish_beyond_the_slots_is_refused_at_once_with_both_numbers(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match=r"numWorkers is 9, but the cluster has 3 slots"):
        choose_num_workers(spark, 9)


def test_executors_that_were_lost_and_not_replaced_are_an_error_with_numbers(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "EXECUTORS_START_S", 0.2)
    with pytest.raises(ConfigError, match=r"4 workers .* the cluster has 3 slots left, .* lost"):
        require_free_slots(spark, 4)


def test_a_fit_without_num_workers_trains_on_every_slot(spark: SparkSession) -> None:
    model = estimator(numWorkers=None, batchSize=10).fit(frame(spark, rows=60))
    assert description_of_last_fit(spark).startswith("sparkdl: train Sequential on 3 workers")
    assert model.history[0].examples == 60


def description_of_last_fit(spark: SparkSession) -> str:
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    found = [jobs.apply(i) for i in range(jobs.size())]
    ours = [j for j in found if j.jobGroup().isDefined()]
    last = max(
        (j for j in ours if j.jobGroup().get().startswith("sparkdl-")), key=lambda j: j.jobId()
    )
    return str(last.description().get())


def test_partitions_of_a_plain_frame_are_known_without_a_job(spark: SparkSession) -> None:
    assert known_partitions(frame(spark, partitions=5)) == 5


def test_partitions_after_a_shuffle_are_not_known_before_it_ran(spark: SparkSession) -> None:
    assert known_partitions(frame(spark).groupBy("label").count()) is None
