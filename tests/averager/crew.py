"""Workers at an averager, each a client over a connection of its own; what they call runs aside.

Time passes for the averager only when the test lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from by_keyword import open_averager
from toys import drive
from virtual_time import Heard, VirtualClock
from waiting import WAIT_S, eventually

from sparkdl.averager import Averager, AveragerClient
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.run_events import RunEvent as Event
from sparkdl.averager.values.wire_format import FULL_PRECISION, WireFormat
from sparkdl.events import WindowReport
from sparkdl.feed.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.transport.connection import Connection

LAYOUT = (Segment("parameters", torch.float32, 3),)
SILENCE_S = 120.0
"""The deadline by which a worker counts its averager as gone; it is real, and never passes."""


def window(rank: int, step: int = 1, **fields: Any) -> WindowReport:
    """A window of two rows, which ends with a step of the first epoch."""
    given = {"epoch": 1, "step_of_epoch": step, "examples": 2, "loss_sum": 1.0, "last": False}
    return WindowReport(rank=rank, step=step, **{**given, **fields})


class Crew:
    """The workers of one averager, whose center is three numbers.

    Attributes:
        averager: theirs.
        clock: the averager's, and by default the workers' own.
        heard: what the averager has decided on.
        outcome: of the driver, which lets them start and then waits for the end of the run.
    """

    def __init__(self, averager: Averager, wire_format: WireFormat, clock: VirtualClock) -> None:
        self.averager = averager
        self.clock = clock
        self.heard = Heard(averager)
        self._wire_format = wire_format
        self._clients: dict[int, AveragerClient] = {}
        self._left: list[AveragerClient] = []
        self._pool = ThreadPoolExecutor(16)
        self.outcome: Future[list[Event]] = self._pool.submit(drive, averager)

    def join(self, rank: int, **options: Any) -> Future[Any]:
        """A worker joins, for the first time or again, and waits for the center."""
        client = AveragerClient(
            self.averager.address,
            rank,
            self._wire_format,
            deadline_s=SILENCE_S,
            **{"now": self.clock, **options},
        )
        if rank in self._clients:
            self._left.append(self._clients[rank])
        self._clients[rank] = client
        return self.call(client.start, ShardStatistics(2, ()), [torch.zeros(3)], LAYOUT)

    def exchange(self, report: WindowReport, value: float = 1.0) -> Future[list[float]]:
        """A worker contributes ``value`` three times; returns what it has afterwards."""
        return self.call(self._exchange, report, value)

    def client(self, rank: int) -> AveragerClient:
        """The worker's end."""
        return self._clients[rank]

    def lose(self, rank: int) -> None:
        """The worker's connection breaks, and the averager has noticed."""
        before = len(self.averager.losses)
        self._clients[rank].__exit__(None, None, None)
        assert eventually(lambda: len(self.averager.losses) > before)

    def wait_for(self, event: str, rank: int, times: int = 1) -> None:
        """Wait until the averager has decided on what a worker does."""
        assert eventually(lambda: self.heard(event, rank, times))

    def wait(self, seconds: float) -> None:
        """Time passes at the averager, which looks at its clock meanwhile."""
        self.clock.run(self.averager, seconds)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call in a thread of its own."""
        return self._pool.submit(function, *arguments)

    def close(self) -> None:
        """Leave without a word, once the averager is closed."""
        for client in [*self._clients.values(), *self._left]:
            client.__exit__(None, None, None)
        self._pool.shutdown()

    def _exchange(self, report: WindowReport, value: float) -> list[float]:
        state = torch.full((3,), value)
        self._clients[report.rank].exchange([state], report)
        values: list[float] = state.tolist()
        return values


@contextmanager
def crew(
    world_size: int,
    *,
    wire_format: WireFormat | None = None,
    center: float = 0.0,
    deadline_s: float = 60.0,
    max_failures: int = 5,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Crew]:
    """Workers that have started, and hold the center.

    Args:
        world_size: how many.
        wire_format: how values travel.
        center: each of its numbers.
        deadline_s: the averager's.
        max_failures: losses that the run survives.
        options: more arguments of the workers' clients.
        settings: more arguments of the averager.
    """
    wire_format = wire_format or FULL_PRECISION
    clock = VirtualClock()
    with ExitStack() as stack:
        averager = open_averager(
            LAYOUT,
            [torch.full((3,), center)],
            world_size,
            wire_format,
            deadline_s=deadline_s,
            tolerance=Tolerance(max_failures),
            now=clock,
            **settings,
        )
        workers = Crew(averager, wire_format, clock)
        stack.callback(workers.close)
        stack.enter_context(averager)
        for started in [workers.join(rank, **(options or {})) for rank in range(world_size)]:
            started.result(WAIT_S)
        yield workers


def sent_values(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each message has that workers have sent, from now on."""
    sent: list[int] = []
    send = Connection.send_values

    def send_values(connection: Connection, values: torch.Tensor, header: Any = None) -> None:
        sent.append(len(values))
        send(connection, values, header)

    monkeypatch.setattr(Connection, "send_values", send_values)
    return sent
