"""How many workers a cluster can run at the same time, and that runs of one application share."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from frames import estimator, frame
from pyspark.sql import SparkSession
from subprocesses import printed_by

from sparkdl.errors import ConfigError
from sparkdl.spark.catalyst.cluster import count_slots
from sparkdl.spark.catalyst.plans import known_partitions
from sparkdl.spark.cluster import slots
from sparkdl.spark.cluster.slots import (
    SlotQueue,
    _promised_slots,
    _seconds_since_last_executor,
    _wait_for_executors,
    choose_num_workers,
    queued,
    require_free_slots,
)

EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
TASK_GPUS = "spark.task.resource.gpu.amount"
ON_DEMAND = "spark.dynamicAllocation.enabled"
FEWEST = "spark.dynamicAllocation.minExecutors"


def test_no_wish_means_every_slot(spark: SparkSession) -> None:
    assert choose_num_workers(spark, None) == 3


def test_slots_are_the_cores_of_all_executors(spark: SparkSession) -> None:
    assert choose_num_workers(spark, 3) == 3  # waits for executors that are still starting
    assert count_slots(spark) == 3


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


PROMISES: list[tuple[str, dict[str, str], int | None]] = [
    ("local-cluster[3,2,1024]", {}, 6),
    ("local-cluster[3,2,1024]", {"spark.task.cpus": "2"}, 3),
    ("local-cluster[3,2,1024]", {"spark.cores.max": "4"}, 4),
    ("local-cluster[3,2,1024]", {"spark.cores.max": "40"}, 6),
    ("local-cluster[3,2,1024]", {"spark.cores.max": "4", "spark.task.cpus": "2"}, 1),
    ("local-cluster[3,8,1024]", {EXECUTOR_GPUS: "4", TASK_GPUS: "2"}, 6),
    ("local-cluster[3,8,1024]", {EXECUTOR_GPUS: "5", TASK_GPUS: "2"}, 6),
    ("local-cluster[3,8,1024]", {EXECUTOR_GPUS: "2", TASK_GPUS: "0.4"}, 12),
    ("local-cluster[3,1,1024]", {EXECUTOR_GPUS: "4", TASK_GPUS: "2"}, 3),
    ("local-cluster[3,8,1024]", {EXECUTOR_GPUS: "4"}, 24),
    ("spark://h:7077", {"spark.executor.instances": "4", "spark.executor.cores": "3"}, 12),
    (
        "spark://h:7077",
        {
            "spark.executor.instances": "4",
            "spark.executor.cores": "3",
            "spark.cores.max": "8",
        },
        6,
    ),
    ("spark://h:7077", {"spark.cores.max": "8"}, None),
    ("spark://h:7077", {"spark.executor.instances": "4"}, None),
    ("yarn", {"spark.executor.instances": "4"}, 4),
    ("yarn", {}, None),
    ("yarn", {ON_DEMAND: "true"}, 0),
    ("yarn", {ON_DEMAND: "true", "spark.executor.instances": "4"}, 0),
    ("yarn", {ON_DEMAND: "true", FEWEST: "2", "spark.executor.cores": "3"}, 6),
    ("spark://h:7077", {ON_DEMAND: "true", FEWEST: "2", "spark.executor.cores": "3"}, 6),
    ("spark://h:7077", {ON_DEMAND: "true", FEWEST: "2"}, None),
    ("local-cluster[3,2,1024]", {ON_DEMAND: "true"}, 0),
    ("local[4]", {}, 0),
]


def test_what_the_configuration_promises_is_never_more_than_cores_max() -> None:
    wrong = []
    for master, conf, promised in PROMISES:
        if (found := _promised_slots(session_with(master, conf))) != promised:
            wrong.append((master, conf, promised, found))
    assert wrong == []


def session_with(master: str, conf: dict[str, str]) -> Any:
    context = SimpleNamespace(master=master, getConf=lambda: conf)
    return SimpleNamespace(sparkContext=context)


def test_without_an_executor_dynamic_allocation_is_named_or_the_fewest_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = 0.0

    def sleep(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(slots, "time", SimpleNamespace(monotonic=lambda: passed, sleep=sleep))
    monkeypatch.setattr(slots, "count_slots", lambda *_: 4 if passed > 40 else 0)
    on_demand = {ON_DEMAND: "true"}
    with pytest.raises(ConfigError, match=r"starts none before tasks wait .* set numWorkers, or"):
        choose_num_workers(session_with("yarn", on_demand), None)
    assert passed == 0
    assert choose_num_workers(session_with("yarn", on_demand), 3) == 3
    assert passed == 0
    assert choose_num_workers(session_with("yarn", {**on_demand, FEWEST: "4"}), None) == 4
    assert passed > 40
    monkeypatch.setattr(slots, "count_slots", lambda *_: 0)
    with pytest.raises(ConfigError, match="no free executor after 60 s"):
        choose_num_workers(session_with("yarn", {**on_demand, FEWEST: "4"}), None)


def test_where_executors_have_all_cores_of_a_host_dynamic_allocation_may_give_any_number() -> None:
    conf = {ON_DEMAND: "true", "spark.dynamicAllocation.maxExecutors": "2"}
    found = {}
    for master in ("spark://h:7077", "yarn"):
        found[master] = slots._slots_on_demand(session_with(master, conf))
    assert found == {"spark://h:7077": float("inf"), "yarn": 2}


@pytest.mark.parametrize(("wanted", "waited"), [(None, 3), (2, 2), (9, 3)])
def test_where_nothing_is_promised_executors_are_waited_for_while_they_register(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None, waited: int
) -> None:
    """One of one core every few seconds, three in all, of at most eight."""
    passed, every_s = 0.0, 0.75 * slots.LAST_EXECUTOR_S

    def sleep(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    def registered(*_: object) -> int:
        return min(3, int(passed / every_s))

    def since_last(_: object) -> float:
        return passed - every_s * registered() if registered() else 0.0

    time = SimpleNamespace(monotonic=lambda: passed, sleep=sleep)
    monkeypatch.setattr(slots, "time", time)
    monkeypatch.setattr(slots, "count_slots", registered)
    monkeypatch.setattr(slots, "_seconds_since_last_executor", since_last)
    context = SimpleNamespace(master="spark://h:7077", getConf=lambda: {"spark.cores.max": "8"})
    session: Any = SimpleNamespace(sparkContext=context)
    assert _wait_for_executors(session, wanted, None) == waited


def test_the_last_executor_of_a_session_registered_some_time_ago(spark: SparkSession) -> None:
    choose_num_workers(spark, 3)
    time.sleep(0.1)
    age = _seconds_since_last_executor(spark)
    started = spark.sparkContext.startTime / 1000
    assert 0.1 <= age <= time.time() - started


@pytest.mark.nightly
@pytest.mark.parametrize(("cpus", "slots"), [(1, 4), (2, 1)])
def test_cores_max_is_what_spark_gives_and_nothing_more_is_waited_for(
    cpus: int, slots: int
) -> None:
    """A session of its own, on the standalone master that local-cluster starts."""
    code = (
        "import time; from sparkdl import create_session\n"
        "from sparkdl.spark.cluster.slots import choose_num_workers\n"
        "conf = {'spark.cores.max': '4', 'spark.ui.enabled': 'false',\n"
        f"    'spark.task.cpus': '{cpus}', 'spark.executor.memory': '512m'}}\n"
        "spark = create_session('slots', 'local-cluster[3,2,512]', conf)\n"
        "started = time.monotonic()\n"
        "print('chosen', choose_num_workers(spark, None), time.monotonic() - started < 30)\n"
        "spark.stop()\n"
    )
    printed = printed_by("-c", code)
    assert f"chosen {slots} True" in printed


@pytest.mark.nightly
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


DEADLINE_S = 60.0


class Holder:
    """A run that holds its slots until it is told to leave."""

    def __init__(
        self, queue: SlotQueue, pool: ThreadPoolExecutor, workers: int, slots: int
    ) -> None:
        self.started = threading.Event()
        self._leave = threading.Event()
        self._done: Future[None] = pool.submit(self._run, queue, workers, slots)

    def leave(self) -> None:
        self._leave.set()
        self._done.result(DEADLINE_S)

    def _run(self, queue: SlotQueue, workers: int, slots: int) -> None:
        with queue.take(workers, lambda: slots):
            self.started.set()
            assert self._leave.wait(DEADLINE_S)


def test_runs_that_fit_in_together_run_together() -> None:
    queue = SlotQueue()
    with queue.take(2, lambda: 4), queue.take(2, lambda: 4):
        pass


def test_a_run_waits_for_slots_that_another_holds(caplog: pytest.LogCaptureFixture) -> None:
    queue = SlotQueue()
    with ThreadPoolExecutor() as pool:
        first = Holder(queue, pool, workers=2, slots=3)
        assert first.started.wait(DEADLINE_S)
        second = Holder(queue, pool, workers=2, slots=3)
        assert not second.started.wait(0.2)
        first.leave()
        assert second.started.wait(DEADLINE_S)
        second.leave()
    assert (
        "2 workers are waiting for other runs of this application to free enough slots"
        in caplog.text
    )


def test_who_came_first_is_not_overtaken_by_a_smaller_run() -> None:
    queue = SlotQueue()
    with ThreadPoolExecutor() as pool:
        first = Holder(queue, pool, workers=2, slots=3)
        assert first.started.wait(DEADLINE_S)
        large = Holder(queue, pool, workers=3, slots=3)
        assert not large.started.wait(0.2)
        small = Holder(queue, pool, workers=1, slots=3)
        assert not small.started.wait(0.2)
        first.leave()
        assert large.started.wait(DEADLINE_S)
        assert not small.started.is_set()
        large.leave()
        assert small.started.wait(DEADLINE_S)
        small.leave()


def test_alone_a_run_starts_whatever_is_counted() -> None:
    """Executors may have been lost since; what to say of that is for others."""
    with SlotQueue().take(2, lambda: 0):
        pass


def test_slots_are_counted_again_while_a_run_waits() -> None:
    queue, slots = SlotQueue(), [1.0]
    with ThreadPoolExecutor() as pool, ExitStack() as held:
        held.enter_context(queue.take(1, lambda: slots[0]))
        started = pool.submit(held.enter_context, queue.take(1, lambda: slots[0]))
        slots[0] = 2.0
        started.result(DEADLINE_S)


def test_a_run_that_fails_gives_its_slots_back() -> None:
    queue = SlotQueue()
    with pytest.raises(ValueError, match="on the way"), queue.take(1, lambda: 1):
        raise ValueError("on the way")
    with queue.take(1, lambda: 1):
        pass


def test_a_run_that_is_interrupted_while_it_waits_does_not_keep_others_waiting() -> None:
    queue, looks = SlotQueue(), []

    def interrupted() -> float:
        looks.append(1)
        raise KeyboardInterrupt

    with queue.take(1, lambda: 2):
        with pytest.raises(KeyboardInterrupt), queue.take(1, interrupted):
            pass
        with queue.take(1, lambda: 2):
            pass
    assert looks


def test_slots_are_those_for_what_each_worker_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that each had half of the GPUs would wait for each other, however many the cores."""
    counted: list[object] = []
    profile, spark = object(), object()

    def count(session: object, needed: object) -> int:
        counted.append((session, needed))
        return 4

    monkeypatch.setattr("sparkdl.spark.cluster.slots.most_slots", count)
    with queued(spark, 2, profile), queued(spark, 2, profile):  # type: ignore[arg-type]
        pass
    assert set(counted) == {(spark, profile)}
