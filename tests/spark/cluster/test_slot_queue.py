"""Runs of one application share its slots."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from sparkdl.spark.cluster.slots import SlotQueue, queued

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
