"""Who looks for the reason of a hang finds it in the driver: where the workers are stuck."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from frames import estimator, frame, with_features
from models import Slow, append_line, lines, task_rank
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType
from torch import Tensor, nn

import sparkdl
from sparkdl.averager.coordination import membership
from sparkdl.errors import DeadlineError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def _warm(spark: SparkSession) -> None:
    """The first workers of a session take their time to start, the timeouts here are short."""
    estimator(numWorkers=3).fit(frame(spark))


def waits_for_a_lock(seconds: float) -> None:
    time.sleep(seconds)


class Stuck(nn.Module):
    """Rank 1 waits in its third pass, the first time that it comes there."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.path, self.seconds, self.passes = path, seconds, 0

    def forward(self, features: Tensor) -> Tensor:
        self.passes += task_rank() == 1
        if self.passes == 3 and not lines(self.path):
            append_line(self.path, "here")
            waits_for_a_lock(self.seconds)
        return self.layer(features)


@pytest.mark.slow
def test_the_error_about_a_silent_worker_has_its_stacks(
    spark: SparkSession, tmp_path: Path
) -> None:
    # The timeout also limits the workers' start, and a session's first start is its slowest.
    estimator().fit(frame(spark))
    model = Stuck(str(tmp_path / "stuck"), 13.0)
    with pytest.raises(DeadlineError, match=r"rank 1 .* did not contribute to round") as raised:
        estimator(model=model, epochs=3, timeout=8.0, maxFailures=0).fit(frame(spark))
    shown = "".join(traceback.format_exception(raised.value))
    told = shown.partition("Workers that have not left:\n")[2]
    assert "in waits_for_a_lock" in told[told.index("rank 1 on ") :]


@pytest.mark.slow
def test_the_stacks_of_a_worker_that_is_dropped_are_logged_and_training_goes_on(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(membership, "STRAGGLER_S", 1.5)
    model = Stuck(str(tmp_path / "stuck"), 5.0)
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        fitted = estimator(model=model, epochs=3).fit(frame(spark))
    assert [epoch.examples for epoch in fitted.history] == [60] * 3
    told = [r.getMessage() for r in caplog.records if "still running" in r.getMessage()]
    assert len(told) == 1
    assert "rank 1 on " in told[0]
    assert "in waits_for_a_lock" in told[0]


def signal_soon(path: Path) -> threading.Thread:
    """Send this process SIGUSR1 once a worker has said that it is busy."""

    def send() -> None:
        deadline = time.monotonic() + 60
        while not lines(path) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.slow
def test_at_sigusr1_the_driver_writes_where_the_workers_of_a_fit_are(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sender = signal_soon(tmp_path / "stuck")
    estimator(model=Stuck(str(tmp_path / "stuck"), 3.0), epochs=2).fit(frame(spark))
    sender.join()
    told = capsys.readouterr().err
    assert "rank 0 on " in told
    assert "rank 1 on " in told
    assert "in waits_for_a_lock" in told
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.slow
def test_at_sigusr1_the_driver_writes_where_the_workers_of_a_function_are(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "busy")

    def busy() -> int:
        append_line(path, "here")
        waits_for_a_lock(3.0)
        return task_rank()

    sender = signal_soon(tmp_path / "busy")
    assert sparkdl.run(busy, num_workers=2) == [0, 1]
    sender.join()
    assert "in waits_for_a_lock" in capsys.readouterr().err


@pytest.mark.slow
def test_an_upstream_that_takes_longer_than_the_timeout_is_waited_for(spark: SparkSession) -> None:
    slowly = F.udf(lambda value: time.sleep(1.2) or value, LongType(), useArrow=False)
    upstream = spark.range(0, 15, 1, 15).select(slowly("id").alias("id")).repartition(2)
    fitted: Any = estimator(timeout=4.0, batchSize=4).fit(with_features(upstream))
    assert fitted.history[0].examples == 15


@pytest.mark.slow
def test_a_single_task_upstream_that_takes_longer_than_the_timeout_is_waited_for(
    spark: SparkSession,
) -> None:
    """As many tasks as workers, and nothing for Spark to report while they run."""
    slowly = F.udf(lambda value: time.sleep(10) or value, LongType(), useArrow=False)
    upstream = spark.range(0, 2, 1, 2).select(slowly("id").alias("id")).repartition(2)
    upstream = upstream.select(F.explode(F.sequence("id", F.col("id") + 4)).alias("id"))
    fitted: Any = estimator(timeout=7.0, batchSize=4).fit(with_features(upstream))
    assert fitted.history[0].examples == 10


@pytest.mark.slow
def test_workers_that_are_never_started_are_named_in_time(spark: SparkSession) -> None:
    """Two of three slots are taken, which Spark has no word for."""
    context = spark.sparkContext
    taken = threading.Thread(
        target=lambda: context.parallelize(range(2), 2).foreach(lambda _: time.sleep(16))
    )
    taken.start()
    time.sleep(1)
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"did not start \(1 of 3 workers did"):
        estimator(model=Slow(0.0), numWorkers=3, timeout=6.0).fit(frame(spark))
    assert time.monotonic() - started < 16
    taken.join()
