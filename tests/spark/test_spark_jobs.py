"""What the Spark UI shows of a fit, and what a fit leaves of the user's own settings."""

from __future__ import annotations

from dataclasses import dataclass

from frames import estimator, frame, frame_of_sizes
from pyspark.sql import DataFrame, SparkSession

from sparkdl import ParameterAveraging


@dataclass(frozen=True)
class SparkJob:
    number: int
    group: str | None
    description: str | None
    stages: int


def jobs_of(spark: SparkSession) -> list[SparkJob]:
    """Every job of the session, as the Spark UI has them."""
    found = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    jobs = [found.apply(i) for i in range(found.size())]
    return [
        SparkJob(
            job.jobId(),
            job.jobGroup().get() if job.jobGroup().isDefined() else None,
            job.description().get() if job.description().isDefined() else None,
            job.stageIds().size(),
        )
        for job in jobs
    ]


def jobs_during_fit(rows: DataFrame, **changes: object) -> list[SparkJob]:
    before = {job.number for job in jobs_of(rows.sparkSession)}
    estimator(**changes).fit(rows)
    return [job for job in jobs_of(rows.sparkSession) if job.number not in before]


def training_jobs(jobs: list[SparkJob]) -> list[SparkJob]:
    return [job for job in jobs if (job.group or "").startswith("sparkdl-")]


def test_a_fit_is_one_job_with_workers_in_a_group_of_its_own(spark: SparkSession) -> None:
    (first,) = training_jobs(jobs_during_fit(frame(spark, partitions=2), epochs=3))
    (second,) = training_jobs(jobs_during_fit(frame(spark, partitions=2)))
    assert first.group != second.group


def test_the_description_says_model_workers_and_strategy(spark: SparkSession) -> None:
    (job,) = training_jobs(
        jobs_during_fit(
            frame(spark, partitions=3), strategy=ParameterAveraging(period=4), numWorkers=3
        )
    )
    assert job.description is not None
    assert job.description.startswith("sparkdl: train Sequential on 3 workers, ")
    assert "ParameterAveraging(period=4" in job.description


def test_a_balanced_frame_is_trained_on_without_a_shuffle(spark: SparkSession) -> None:
    (job,) = training_jobs(jobs_during_fit(frame(spark, rows=60, partitions=3), numWorkers=3))
    assert job.stages == 1


def test_a_skewed_frame_is_trained_on_after_a_shuffle(spark: SparkSession) -> None:
    jobs = training_jobs(jobs_during_fit(frame_of_sizes(spark, [55, 3, 2]), numWorkers=3))
    # Adaptive execution runs the shuffle as a job of its own.
    assert sum(job.stages for job in jobs) >= 2
    assert len({job.group for job in jobs}) == 1


def test_the_checks_look_at_the_data_in_one_pass(spark: SparkSession) -> None:
    jobs = jobs_during_fit(frame(spark, rows=60, partitions=3), numWorkers=3)
    # Adaptive execution runs the two stages of an aggregation as two jobs.
    assert len(jobs) - len(training_jobs(jobs)) <= 2


def test_the_users_own_job_group_survives_a_fit(spark: SparkSession) -> None:
    context = spark.sparkContext
    context.setJobGroup("nightly", "my own report")
    try:
        jobs = jobs_during_fit(frame(spark, partitions=2))
        assert context.getLocalProperty("spark.jobGroup.id") == "nightly"
        assert context.getLocalProperty("spark.job.description") == "my own report"
        assert len(training_jobs(jobs)) == 1
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(name, None)
