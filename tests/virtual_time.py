"""Time that passes only when a test says so, and what an averager has decided on until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from decided import Told, told
from waiting import WAIT_S

from sparkdl.averager import Averager
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.transport.service import Service

T = TypeVar("T")


class VirtualClock:
    """A clock that stands still until it is moved on.

    Attributes:
        passed: how many seconds have passed on it.
    """

    def __init__(self) -> None:
        self.passed = 0.0

    def __call__(self) -> float:
        return 1000.0 + self.passed

    def step(self, service: Service, seconds: float = 1.0) -> None:
        """Let time pass at once, between what had arrived before and what follows from it."""
        settle(service)
        self.passed += seconds
        settle(service)

    def run(self, service: Service, seconds: float) -> None:
        """Let time pass second by second, as it does for a service that never stands still."""
        for _ in range(round(seconds)):
            self.step(service)

    @contextmanager
    def running_once(self, averager: Averager, question: Callable[[], bool]) -> Iterator[None]:
        """Let time pass, from when something is true until the averager's run has ended."""
        coordinator, left = coordinator_of(averager), threading.Event()

        def pass_time() -> None:
            while not (question() or left.is_set()):
                time.sleep(0.005)
            while not (coordinator.ended or left.is_set()):
                self.step(averager)

        thread = threading.Thread(target=pass_time)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join(WAIT_S)


def settle(service: Service) -> None:
    """Wait until a service has handled all that had arrived, and looked at its clock."""
    # One iteration of its loop may be under way; the next one asks all sockets, and has decided on
    # what they had before the one after it begins.
    for _ in range(3):
        done = threading.Event()
        service.post(done.set)
        assert done.wait(WAIT_S)


class Heard:
    """What an averager has decided on.

    Attributes:
        decisions: what it has decided, in order.
    """

    def __init__(self, averager: Averager) -> None:
        self.decisions: list[Told] = []
        self._events: list[tuple[str, Any]] = []
        decide = averager._decide

        def heard(event: Any, *arguments: Any, **options: Any) -> None:
            decide(event, *arguments, **options)
            self.decisions += told(averager.coordinator.do.decisions)
            self._events.append((event.__name__, arguments))

        averager._decide = heard  # type: ignore[method-assign]

    def __call__(self, event: str, rank: int, times: int = 1) -> bool:
        """Whether a worker has done something so many times."""
        told = [arguments[0].rank for name, arguments in list(self._events) if name == event]
        return told.count(rank) >= times


def coordinator_of(averager: Averager) -> Coordinator:
    """What decides for an averager."""
    return averager.coordinator
