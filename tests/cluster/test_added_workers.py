"""Workers are added to a fit where slots become free, and leave it with their hosts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every
from frames import descended, estimator, frame, labels_of
from hosts import Cluster, Host, Hosts, reason_not_to
from models import DiesOnce, RowIds, row_ids
from pyspark.sql import SparkSession
from test_preemption import wait_until
from waiting import eventually

from sparkdl import AsynchronousSGD, GossipAveraging, GradientAllReduce, ParameterAveraging
from sparkdl.callbacks import Callback, Training
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator import estimator as fits
from sparkdl.events import EpochSummary
from sparkdl.spark.launch.spare_tasks import SpareTasks

ROWS = 60


class WaitsForASlot(Callback):
    """Holds the end of the first epoch until a task of the third slot waits for a worker."""

    def __init__(self, made: list[SpareTasks]) -> None:
        self.made = made

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        if summary.epoch == 1:
            assert eventually(lambda: self.made[0].free == 1, 60.0)


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SpareTasks]]:
    made: list[SpareTasks] = []

    class Noted(SpareTasks):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(fits, "SpareTasks", Noted)
        yield made


def grown(monkeypatch: pytest.MonkeyPatch, rows: Any, **changes: Any) -> Any:
    """A model that two workers begin to train, and three go on with after the first epoch."""
    with noted(monkeypatch) as made:
        waits = WaitsForASlot(made)
        return estimator(maxWorkers=3, callbacks=[waits], **changes).fit(rows)


def ids_of_growing(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, trace: Path, **changes: Any
) -> dict[int, list[int]]:
    """What each worker has trained on in three epochs: each row once in each of them."""
    rows = frame(spark, rows=ROWS, partitions=4)
    settings = {"model": RowIds(str(trace)), "featuresCols": ["features", "id"], "epochs": 3}
    model = grown(monkeypatch, rows, **settings, **changes)
    assert [row.workers for row in model.history] == [2, 3, 3]
    assert model.summary.num_workers == 3
    ids = row_ids(trace)
    assert Counter(i for of in ids.values() for i in of) == dict.fromkeys(range(ROWS), 3)
    return ids


def test_a_worker_is_added_between_two_epochs_and_rows_are_dealt_anew(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of_growing(spark, monkeypatch, tmp_path / "ids")
    assert sorted(map(len, ids.values())) == [40, 70, 70]
    assert set(ids[2]) == set(ids[2][:20])  # the same share in both of its epochs


@every("changes", [{"reshuffleEvery": 1}, {"storeIn": "memory"}, {"shuffleRows": "spark"}])
def test_however_rows_travel_each_is_trained_on_once_an_epoch(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    ids_of_growing(spark, monkeypatch, tmp_path / "ids", **changes)


def test_it_trains_as_one_process_on_all_rows(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is on all rows, whoever has which."""
    full = {"batchSize": ROWS, "strategy": ParameterAveraging(1), "epochs": 4}
    model = grown(monkeypatch, frame(spark, rows=ROWS), **full)
    assert [row.workers for row in model.history] == [2, 3, 3, 3]
    start = estimator().getModel()
    expected = descended(start, labels_of(range(ROWS)), lr=0.1, steps=4)
    for mine, its in zip(model.module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=1e-5, atol=1e-7)


def test_a_worker_that_dies_as_it_is_added_comes_back(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = tmp_path / "died"
    model = grown(
        monkeypatch,
        frame(spark, rows=ROWS),
        model=DiesOnce(str(died), executor=False, rank=2, step=1),
        epochs=3,
    )
    assert died.read_text()
    assert [row.workers for row in model.history] == [2, 3, 3]
    assert [row.examples for row in model.history] == [ROWS] * 3


def test_without_a_free_slot_nothing_changes_and_nothing_is_left(spark: SparkSession) -> None:
    model = estimator(numWorkers=3, maxWorkers=4, epochs=2).fit(frame(spark, rows=ROWS))
    assert [row.workers for row in model.history] == [3, 3]
    tracker = spark.sparkContext.statusTracker()
    assert eventually(lambda: not tracker.getActiveJobsIds())


def test_what_cannot_change_its_number_of_workers_is_refused_by_name(spark: SparkSession) -> None:
    rows = frame(spark, rows=ROWS)
    among = ParameterAveraging(aggregation="executors")
    for strategy in (GradientAllReduce(), among, GossipAveraging()):
        with pytest.raises(ConfigError, match=f"{type(strategy).__name__} has workers that exch"):
            estimator(strategy=strategy, maxWorkers=3).fit(rows)
    with pytest.raises(ConfigError, match="maxWorkers is 1, but the fit begins with 2 workers"):
        estimator(maxWorkers=1).fit(rows)
    with pytest.raises(ConfigError, match="shuffleRows='none' leaves"):
        estimator(maxWorkers=3, shuffleRows="none").fit(rows)
    with pytest.raises(DataError, match="maxWorkers is 100, but there are 60 rows"):
        estimator(maxWorkers=100).fit(rows)


def test_by_default_as_many_begin_as_there_are_slots_but_no_more_than_allowed(
    spark: SparkSession,
) -> None:
    model = estimator(numWorkers=None, maxWorkers=2).fit(frame(spark, rows=ROWS))
    assert [row.workers for row in model.history] == [2]


def test_asynchronous_workers_are_added_too(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = grown(monkeypatch, frame(spark, rows=ROWS), strategy=AsynchronousSGD(), epochs=2)
    assert [row.workers for row in model.history] == [2, 3]
    assert [row.examples for row in model.history] == [ROWS] * 2


reason = reason_not_to()


def on_hosts(test: Any) -> Any:
    """At night, where hosts can be made of this machine."""
    skips = pytest.mark.skipif(reason is not None, reason=str(reason))
    return skips(pytest.mark.nightly(pytest.mark.timeout(500)(test)))


def on_demand(first: int, most: int) -> dict[str, str]:
    """Settings of dynamic allocation."""
    return {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.minExecutors": "1",
        "spark.dynamicAllocation.maxExecutors": str(most),
        "spark.executor.instances": str(first),
        "spark.executor.memory": "512m",
    }


def runs_a_task(host: Host) -> bool:
    lines = [Path(f"/proc/{pid}/cmdline") for pid in host.pids()]
    return any("pyspark" in path.read_text() for path in lines if path.exists())


@on_hosts
def test_executors_that_come_later_join_the_fit_and_no_row_is_lost(tmp_path: Path) -> None:
    """Before its first round or later; the number of workers does not change."""
    output, checkpoints = tmp_path / "result.json", tmp_path / "checkpoints"
    rows, epochs = 120, 12
    with Hosts(2, tmp_path) as hosts, Cluster(hosts) as cluster:
        first, late = hosts.hosts
        late.crash()
        driver = cluster.driver(
            Path(__file__).parent / "train_on_hosts.py",
            str(output),
            f"epochs={epochs}",
            f"rows={rows}",
            "numWorkers=2",
            "batchSize=5",
            "sleep=0.1",
            "timeout=120.0",
            f"checkpointPath={json.dumps(str(checkpoints))}",
            conf=on_demand(1, 2),
            log=tmp_path / "driver.log",
        )
        try:
            wait_until(lambda: runs_a_task(first), driver)
            assert not list(checkpoints.glob("checkpoint-*"))  # it waits for the other
            cluster.boot(late)
            wait_until(lambda: list(checkpoints.glob("checkpoint-000002*")), driver)
            late.crash()
            cluster.boot(late)
            assert driver.wait(200) == 0
        finally:
            driver.kill()
    result = json.loads(output.read_text())
    assert result.get("examples") == [rows] * epochs, result


@on_hosts
def test_hosts_that_come_and_go_add_workers_and_take_them_along(tmp_path: Path) -> None:
    """Two hosts, then four, then three; executors start on demand."""
    output, noted, rows = tmp_path / "result.json", tmp_path / "noted", 240

    def have(number: int) -> bool:
        """Whether so many have trained the last epoch."""
        return noted.exists() and noted.read_text().split()[-1:] == [str(number)]

    with Hosts(4, tmp_path) as hosts, Cluster(hosts) as cluster:
        *_, third, fourth = hosts.hosts
        third.crash()
        fourth.crash()
        driver = cluster.driver(
            Path(__file__).parent / "train_on_hosts.py",
            str(output),
            "epochs=60",
            f"rows={rows}",
            "numWorkers=2",
            "maxWorkers=4",
            "maxFailures=9",
            "batchSize=5",
            "sleep=0.1",
            "timeout=300.0",
            f"noted={json.dumps(str(noted))}",
            conf=on_demand(2, 4),
            log=tmp_path / "driver.log",
        )
        try:
            wait_until(lambda: have(2), driver)
            cluster.boot(third)
            cluster.boot(fourth)
            wait_until(lambda: have(4), driver)
            fourth.crash()
            wait_until(lambda: have(3), driver)
            assert driver.wait(300) == 0
        finally:
            driver.kill()
    result = json.loads(output.read_text())
    seen = result.get("workers", result)
    changes = [number for number, before in zip(seen, [0, *seen], strict=False) if number != before]
    assert changes in ([2, 4, 3], [2, 3, 4, 3]), result
    assert set(result["examples"]) == {rows}
