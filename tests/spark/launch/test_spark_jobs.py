"""Spark's jobs and threads of a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from every_row import every_row
from frames import estimator, frame, frame_of_sizes
from models import lines
from pyspark.sql import DataFrame, SparkSession
from subprocesses import printed_by

from sparkdl import ParameterAveraging
from sparkdl.errors import DataError


@dataclass(frozen=True)
class SparkJob:
    number: int
    group: str | None
    description: str | None
    stages: int


def jobs_of(spark: SparkSession) -> list[SparkJob]:
    """Every job of the session, as the Spark UI has them."""
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(10_000)
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


def read_through(rows: DataFrame, trace: Path) -> DataFrame:
    """The same rows; records each partition that is computed."""
    path = str(trace)

    def note(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        with open(path, "a") as file:
            file.write(f"{TaskContext.get().partitionId()}\n")
        yield from batches

    return rows.mapInArrow(note, rows.schema)


@pytest.mark.gate
def test_a_fit_is_one_spark_job_in_a_group_of_its_own(spark: SparkSession) -> None:
    strategy = ParameterAveraging(period=4)
    (first,) = jobs_during_fit(frame(spark, partitions=2), epochs=3, strategy=strategy)
    (second,) = jobs_during_fit(frame(spark, partitions=2))
    assert training_jobs([first, second]) == [first, second]
    assert first.group != second.group
    told = "sparkdl: train Sequential on 2 workers, ParameterAveraging(period=4"
    assert str(first.description).startswith(told)


@pytest.mark.gate
@every_row((3, False), (4, True))
def test_a_fit_computes_what_is_upstream_once(
    spark: SparkSession, tmp_path: Path, partitions: int, shuffled: bool
) -> None:
    rows = read_through(frame(spark, partitions=partitions), tmp_path / "computed")
    estimator(numWorkers=3, epochs=3).fit(rows.repartition(5) if shuffled else rows)
    assert Counter(lines(tmp_path / "computed")) == {str(n): 1 for n in range(partitions)}


@pytest.mark.parametrize("spreads", ["exchange", pytest.param("spark", marks=pytest.mark.gate)])
def test_rows_are_computed_once_and_go_through_sparks_shuffle_only_if_that_is_wanted(
    spark: SparkSession, tmp_path: Path, spreads: str
) -> None:
    rows = read_through(frame_of_sizes(spark, [55, 3, 2, 0]), tmp_path / "computed")
    jobs = training_jobs(jobs_during_fit(rows, numWorkers=3, epochs=3, shuffleRows=spreads))
    # Those that are read by one task are all computed in it, and know its number.
    assert len(lines(tmp_path / "computed")) == 4
    # Adaptive execution runs the shuffle as a job of its own.
    assert (sum(job.stages for job in jobs) > 1) is (spreads == "spark")
    assert len({job.group for job in jobs}) == 1


@pytest.mark.gate
def test_data_that_are_refused_were_computed_once(spark: SparkSession, tmp_path: Path) -> None:
    rows = frame_of_sizes(spark, [54, 3, 3]).selectExpr("features", "nullif(label, 2) AS label")
    with pytest.raises(DataError, match="20 null values in 60 rows"):
        estimator(numWorkers=3).fit(read_through(rows, tmp_path / "computed"))
    assert Counter(lines(tmp_path / "computed")) == {"0": 1, "1": 1, "2": 1}


def test_a_balanced_frame_is_trained_on_without_a_shuffle_in_the_users_own_job_group(
    spark: SparkSession,
) -> None:
    context = spark.sparkContext
    context.setJobGroup("nightly", "my own report")
    try:
        (job,) = jobs_during_fit(frame(spark, partitions=3), numWorkers=3)
        assert context.getLocalProperty("spark.jobGroup.id") == "nightly"
        assert context.getLocalProperty("spark.job.description") == "my own report"
        assert (job.group, job.stages) == ("nightly", 1)
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(name, None)


PROGRAM = """
import functools
import json
import os
import sys
from pathlib import Path

import torch
from pyspark.sql import functions as F
from torch import nn

import sparkdl

class Noting(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.folder = folder

    def forward(self, features):
        Path(self.folder, str(os.getpid())).write_text(str(torch.get_num_threads()))
        return self.layer(features)

def threads():
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

if __name__ == "__main__":
    folder = sys.argv[1]
    conf = {"spark.executor.memory": "1024m", "spark.ui.enabled": "false", "spark.task.cpus": "3"}
    spark = sparkdl.create_session("threads", master="local-cluster[1,3,1024]", conf=conf)
    spark.sparkContext.setLogLevel("OFF")
    told = sparkdl.run(threads, num_workers=1)
    features = F.array(F.rand(1), F.rand(2)).cast("array<float>")
    frame = spark.range(20).select(features.alias("features"), (F.col("id") % 2).alias("label"))
    sparkdl.TorchEstimator(
        model=functools.partial(Noting, folder),
        loss=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        strategy=sparkdl.GradientAllReduce(),
        progress=False,
    ).fit(frame)
    Path(folder, str(os.getpid())).unlink(missing_ok=True)  # the driver tries a step
    print(json.dumps([told, [path.read_text() for path in Path(folder).iterdir()]]))
    spark.stop()
"""


@pytest.mark.nightly
def test_a_task_of_three_cores_computes_on_three_threads(tmp_path: Path) -> None:
    program, notes = tmp_path / "program.py", tmp_path / "notes"
    program.write_text(PROGRAM)
    notes.mkdir()
    printed = printed_by(program, notes)
    called, fitted = json.loads(printed.splitlines()[-1])
    assert called == [[3, "3"]]
    assert fitted == ["3"]
