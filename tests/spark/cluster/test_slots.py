"""How many workers a cluster can run at the same time, and that runs of one application share."""

from __future__ import annotations

import math
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from every_row import every_row
from pyspark.sql import SparkSession
from subprocesses import printed_by

from sparkdl.errors import ConfigError
from sparkdl.spark.catalyst.cluster import count_slots, executor_start_times
from sparkdl.spark.cluster import slots
from sparkdl.spark.cluster.network import driver_ports
from sparkdl.spark.cluster.slots import (
    SlotQueue,
    _wait_for_executors,
    choose_num_workers,
    most_slots,
    queued,
    require_free_slots,
)
from sparkdl.transport.service import Service

ON_DEMAND = "spark.dynamicAllocation.enabled"
FEWEST = "spark.dynamicAllocation.minExecutors"
INSTANCES = "spark.executor.instances"


def test_a_wish_within_the_slots_is_granted_and_none_means_every_slot(spark: SparkSession) -> None:
    assert choose_num_workers(spark, 3) == 3  # waits for executors that are still starting
    assert count_slots(spark) == 3  # the cores of all executors
    assert [choose_num_workers(spark, wanted) for wanted in (None, 1, 2, 3)] == [3, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"numWorkers is 9, but the cluster has 3 slots"):
        choose_num_workers(spark, 9)


def test_executors_that_were_lost_and_not_replaced_are_an_error_with_numbers(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "EXECUTORS_START_S", 0.2)
    with pytest.raises(ConfigError, match=r"4 workers .* the cluster has 3 slots left, .* lost"):
        require_free_slots(spark, 4)


def session_with(master: str, conf: dict[str, str]) -> Any:
    context = SimpleNamespace(master=master, _conf=conf)
    return SimpleNamespace(sparkContext=context, conf=conf)


class Registering:
    """A clock, and executors of one core that register at these times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
        self.now, self.times = 0.0, times
        clock = SimpleNamespace(monotonic=self.time, time=self.time, sleep=self.sleep)
        monkeypatch.setattr(slots, "time", clock)
        monkeypatch.setattr(slots, "count_slots", lambda *_: len(self.started()))
        monkeypatch.setattr(slots, "executor_start_times", self.started)

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def started(self, *_: object) -> list[float]:
        return [each for each in self.times if each <= self.now]


def test_without_an_executor_dynamic_allocation_is_named_or_the_fewest_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, on_demand = Registering(monkeypatch, 40.0, 40.0), {ON_DEMAND: "true"}
    with pytest.raises(ConfigError, match=r"starts none before tasks wait .* set numWorkers, or"):
        choose_num_workers(session_with("yarn", on_demand), None)
    assert choose_num_workers(session_with("yarn", on_demand), 3) == 3
    assert cluster.now == 0
    assert choose_num_workers(session_with("yarn", {**on_demand, FEWEST: "2"}), None) == 2
    assert 40 <= cluster.now < 41
    Registering(monkeypatch)
    with pytest.raises(ConfigError, match="no free executor after 60 s"):
        choose_num_workers(session_with("yarn", {**on_demand, FEWEST: "4"}), None)


def test_where_executors_have_all_cores_of_a_host_dynamic_allocation_may_give_any_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere as many slots each as those that are there."""
    Registering(monkeypatch, 0.0)
    conf = {ON_DEMAND: "true", "spark.dynamicAllocation.maxExecutors": "2"}
    found = {m: most_slots(session_with(m, conf)) for m in ("spark://h:7077", "yarn")}
    assert found == {"spark://h:7077": math.inf, "yarn": 2}
    Registering(monkeypatch)
    assert most_slots(session_with("yarn", conf)) == math.inf
    assert most_slots(session_with("yarn", conf), unknown=0) == 0


def test_executors_that_were_told_to_end_do_not_lower_what_each_will_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark's store shows them for seconds in which they have no slots any more."""
    began = SimpleNamespace(getTime=lambda: 1000)
    shown = [SimpleNamespace(id=lambda n=n: n, addTime=lambda: began) for n in ("driver", *"012")]
    jvm = SimpleNamespace(
        statusStore=lambda: SimpleNamespace(
            executorList=lambda _: SimpleNamespace(size=lambda: len(shown), apply=shown.__getitem__)
        ),
        schedulerBackend=lambda: SimpleNamespace(isExecutorActive=lambda n: n == "2"),
    )
    session = session_with("yarn", {ON_DEMAND: "true", "spark.dynamicAllocation.maxExecutors": "3"})
    session.sparkContext._jsc = SimpleNamespace(sc=lambda: jvm)
    monkeypatch.setattr(slots, "count_slots", lambda *_: 1)
    assert executor_start_times(session) == [1.0]
    assert most_slots(session) == 3


WAITS: list[tuple[str, dict[str, str], int | None, int, float]] = [
    # One every 3.75 s, three in all: what is asked for, how many are found, and when.
    ("spark://h:7077", {"spark.cores.max": "8"}, None, 3, 3 * 3.75 + slots.LAST_EXECUTOR_S),
    ("spark://h:7077", {"spark.cores.max": "8"}, 2, 2, 2 * 3.75),
    ("spark://h:7077", {"spark.cores.max": "8"}, 9, 3, 3 * 3.75 + slots.LAST_EXECUTOR_S),
    ("spark://h:7077", {"spark.cores.max": "3"}, None, 3, 3 * 3.75),
    ("spark://h:7077", {INSTANCES: "3"}, None, 3, 3 * 3.75 + slots.LAST_EXECUTOR_S),
    ("spark://h:7077", {INSTANCES: "3", "spark.executor.cores": "1"}, None, 3, 3 * 3.75),
    ("yarn", {INSTANCES: "3"}, None, 3, 3 * 3.75),
    ("yarn", {INSTANCES: "3"}, 9, 3, 3 * 3.75),
    ("yarn", {INSTANCES: "4"}, None, 3, slots.EXECUTORS_START_S),
    ("local-cluster[3,1,1024]", {}, 9, 3, 3 * 3.75),
    ("local-cluster[ 9, 1,1024]", {"spark.cores.max": "3"}, None, 3, 3 * 3.75),
    ("local[4]", {}, 9, 0, 0.0),
]


@every_row(*WAITS)
def test_where_nothing_is_promised_executors_are_waited_for_while_they_register(
    monkeypatch: pytest.MonkeyPatch,
    master: str,
    conf: dict[str, str],
    wanted: int | None,
    found: int,
    after_s: float,
) -> None:
    cluster = Registering(monkeypatch, *(3.75 * number for number in (1, 2, 3)))
    assert _wait_for_executors(session_with(master, conf), wanted, None) == found
    assert after_s <= cluster.now < after_s + 0.2


def test_the_last_executor_of_a_session_registered_some_time_ago(spark: SparkSession) -> None:
    choose_num_workers(spark, 3)
    time.sleep(0.1)
    age = time.time() - max(executor_start_times(spark))
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


def test_who_has_to_wait_for_slots_is_not_overtaken_by_a_smaller_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
    waiting = "is waiting for other runs of this application to free enough slots"
    for run in ("a run (workers: 3)", "a run (workers: 1)"):
        assert f"{run} {waiting}" in caplog.text


def test_a_run_from_within_another_is_refused_where_it_would_wait_for_that_one() -> None:
    """A callback's fit holds up the workers of its own fit, which leave when that has ended."""
    queue = SlotQueue()
    with queue.take(2, lambda: 3):
        with pytest.raises(ConfigError, match=r"needs slots for 2 .* and 1 are free"):
            queue.take(2, lambda: 3).__enter__()
        with queue.take(1, lambda: 3):
            pass
    with queue.take(3, lambda: 3):
        pass


def test_a_run_from_within_another_does_not_wait_for_who_waits_for_that_one() -> None:
    queue = SlotQueue()
    with ThreadPoolExecutor() as pool:
        with queue.take(2, lambda: 3):
            large = Holder(queue, pool, workers=3, slots=3)
            assert not large.started.wait(0.2)
            with queue.take(1, lambda: 3):
                assert not large.started.is_set()
        assert large.started.wait(DEADLINE_S)
        large.leave()


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

    def count(session: object, needed: object, _: float) -> int:
        counted.append((session, needed))
        return 4

    monkeypatch.setattr("sparkdl.spark.cluster.slots.most_slots", count)
    with queued(spark, 2, profile), queued(spark, 2, profile):  # type: ignore[arg-type]
        pass
    assert set(counted) == {(spark, profile)}


def ports(text: str | None) -> tuple[int, int] | None:
    conf = {"spark.sparkdl.driver.port": text}
    session: Any = SimpleNamespace(conf=conf, sparkContext=SimpleNamespace(_conf={}))
    return driver_ports(session)


def test_it_is_a_port_or_a_range_or_any() -> None:
    assert [ports(text) for text in (None, "", "40000", " 40000 - 40100 ")] == [
        None,
        None,
        (40000, 40000),
        (40000, 40100),
    ]
    for text in ("0", "70000", "2-1", "eth1"):
        with pytest.raises(ConfigError, match=r"spark\.sparkdl\.driver\.port must be .* got '"):
            ports(text)


def test_a_service_takes_it_again_and_names_the_setting_if_it_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        with pytest.raises(ConfigError, match=r"taken on 127.* Widen spark\.sparkdl\.driver\.port"):
            Service("127.0.0.1", ports=(port, port))
    for _ in range(2):  # as when all workers start again
        with Service("127.0.0.1", ports=(port, port)) as service:
            assert service.address.uri == f"tcp://127.0.0.1:{port}"
