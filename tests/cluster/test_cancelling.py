"""Cancelling a fit, or killing its driver, ends every worker within seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from frames import all_jobs_end, estimator, frame, with_features
from models import Slow
from pyspark import InheritableThread
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType
from test_preemption import processes_of, start, wait_for_checkpoint
from waiting import eventually

import sparkdl
from sparkdl.errors import TrainingError
from sparkdl.spark.cluster.slots import count_running_tasks

# They wait, and need sessions of their own.
pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("fits", [True, False], ids=["fit", "run"])
def test_cancelling_the_callers_own_job_group_ends_its_training_and_nothing_else(
    spark: SparkSession, fits: bool, tmp_path: Path
) -> None:
    """Notebooks have a job group for each cell, and cancel that."""
    context = spark.sparkContext
    others: list[int] = []
    cell, over = f"cell {fits}", str(tmp_path / "over")
    assert eventually(lambda: count_running_tasks(spark) == 0, 60)  # cancelled ones take a while

    def train() -> None:
        if fits:
            estimator(model=Slow(0.05), epochs=500, timeout=300.0).fit(frame(spark))
        else:
            sparkdl.run(time.sleep, 300, num_workers=2)

    def one_when_over(_: int) -> int:
        until = time.monotonic() + 120
        while not os.path.exists(over) and time.monotonic() < until:
            time.sleep(0.1)
        return int(os.path.exists(over))

    def other() -> None:
        context.setJobGroup("another", "goes on")
        others.append(context.parallelize([1], 1).map(one_when_over).sum())

    def cancel() -> None:
        eventually(lambda: context.statusTracker().getJobIdsForGroup(cell), 60)
        time.sleep(1)
        context.cancelJobGroup(cell)

    beside = InheritableThread(target=other)
    beside.start()
    canceller = threading.Thread(target=cancel)
    context.setJobGroup(cell, "what the user is waiting for")
    canceller.start()
    started = time.monotonic()
    try:
        with pytest.raises(TrainingError, match="cancel"):
            train()
        assert time.monotonic() - started < 60
    finally:
        Path(over).touch()
        canceller.join()
        context.setLocalProperty("spark.jobGroup.id", None)
    beside.join()
    assert others == [1]
    assert all_jobs_end(spark)


def test_cancelling_a_fit_while_its_upstream_is_shuffled_ends_it_at_once(
    spark: SparkSession,
) -> None:
    """Its shuffles run before the workers' job is there, to see how many partitions they make."""
    slowly = F.udf(lambda value: time.sleep(3) or value, LongType(), useArrow=False)
    upstream = spark.range(0, 60, 1, 60).select(slowly("id").alias("id")).repartition(5)
    canceller = threading.Timer(5.0, spark.sparkContext.cancelAllJobs)
    canceller.start()
    started = time.monotonic()
    with pytest.raises(TrainingError, match="cancel"):
        estimator(timeout=300.0).fit(with_features(upstream))
    canceller.join()
    assert time.monotonic() - started < 40
    assert all_jobs_end(spark)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_is_killed_takes_every_worker_along(tmp_path: Path, number: int) -> None:
    path = tmp_path / "checkpoints"
    driver = start(tmp_path / "result", f'checkpointPath="{path}"', "sleep=0.02", "epochs=5000")
    try:
        wait_for_checkpoint(path, driver)
        os.kill(driver.pid, number)
        driver.wait(30)
        assert eventually(lambda: processes_of(driver.pid) == [], 15)
    finally:
        driver.kill()
        subprocess.run(["pkill", "-KILL", "-s", str(driver.pid)], check=False)
