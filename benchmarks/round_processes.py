"""Processes that take part in averaging rounds, started together and timed as one.

``rounds`` has them take part in those of sparkdl's averager, whose service is in this process.
Their clocks agree: ``time.perf_counter`` counts from the machine's start on Linux.
"""

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from sparkdl.averager.client.client import AveragerClient
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.service.server import Averager, EdgeOptions, Snapshot
from sparkdl.averager.values.center import CenterSpec
from sparkdl.averager.values.wire_format import FULL_PRECISION
from sparkdl.events import WindowReport
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.transport.connecting import ServiceAddress

ROUND_TIMEOUT_SECONDS = 120.0

Member = Callable[..., tuple[Callable[[], None], torch.Tensor]]
"""Called as ``member(rank, *arguments)`` in a process of its own. Returns a function that takes
part in one round, and the float32 vector of shape (numel,) that the round averages in place."""


class RoundProcesses:
    """``count`` processes, each a member of every round.

    Before each round a member fills its vector with its rank; after it, outside the measured time,
    it checks that the vector holds ``expected`` everywhere.

    Args:
        member: an importable function; see ``Member``.
        count: number of processes; their ranks are 0 to count - 1.
        arguments: handed to the member behind its rank; picklable.
        expected: the average.
    """

    def __init__(
        self,
        member: Member,
        count: int,
        arguments: tuple[Any, ...],
        *,
        expected: float,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, member, rank, arguments, expected),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._wait()

    def round(self) -> float:
        """Runs one round; returns the seconds from its start to the last member's end."""
        start = time.perf_counter()
        for connection in self._connections:
            connection.send("round")
        return max(self._wait()) - start

    def _wait(self) -> list[float]:
        """Returns when each member ended its round, after all of them prepared the next."""
        ends = [float(answer) for answer in self._answers()]
        # All have ended; only now may they check the result, which takes time on the same cores.
        for connection in self._connections:
            connection.send("prepare")
        self._answers()
        return ends

    def _answers(self) -> list[Any]:
        answers = []
        deadline = time.monotonic() + ROUND_TIMEOUT_SECONDS
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no answer from process {rank} in {ROUND_TIMEOUT_SECONDS:g} s")
            try:
                answers.append(connection.recv())
            except EOFError as error:
                raise RuntimeError(f"process {rank} failed; its traceback is above") from error
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()  # ends a member that waits for its next round
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(
    connection: Connection,
    member: Member,
    rank: int,
    arguments: tuple[Any, ...],
    expected: float,
) -> None:
    """Body of one process: one round for each word that it is sent, until nobody is there."""
    try:
        torch.set_num_threads(1)
        take_part, vector = member(rank, *arguments)
        vector.fill_(expected)  # as after a round: the first request is to prepare the next
        connection.send(time.perf_counter())
        while True:
            if connection.recv() == "round":
                take_part()
                connection.send(time.perf_counter())
                continue
            if not torch.equal(vector, torch.full_like(vector, expected)):
                raise RuntimeError(f"the average is {vector[0]}, ..., {vector[-1]}, not {expected}")
            vector.fill_(rank)
            connection.send("prepared")
    except EOFError:
        os._exit(0)  # gloo now and then aborts on exit; nothing is left to do here


@contextmanager
def averager(
    workers: int, numel: int, edge: EdgeOptions, *, drain: bool = False, **run: Any
) -> Iterator[ServiceAddress]:
    """Opens an averager here, which lets the workers start as a driver does; yields its address.

    Args:
        workers: how many contribute.
        numel: number of float32 parameters.
        edge: how it listens.
        drain: whether what it tells of the run is read as it comes.
        run: of ``RunSpec``.
    """
    layout = (Segment("parameters", torch.float32, numel),)
    with Averager(
        RunSpec(world_size=workers, **run),
        CenterSpec(layout=layout, wire_format=FULL_PRECISION),
        Snapshot(center=[torch.zeros(numel)]),
        edge,
    ) as opened:

        def start() -> None:
            events = opened.events()
            next(events)  # all have said what their rows are
            opened.start()
            for _ in events if drain else ():
                pass

        threading.Thread(target=start, daemon=True).start()
        yield opened.address


@contextmanager
def rounds(workers: int, numel: int, *, tls: bool = False) -> Iterator[RoundProcesses]:
    """Opens an averager here and starts the workers, each in a process of its own.

    Args:
        workers: how many contribute.
        numel: number of float32 parameters.
        tls: whether connections are encrypted.

    Yields:
        The worker processes; each ``round()`` is one round of the averager.
    """
    with (
        averager(workers, numel, EdgeOptions(tls=tls)) as address,
        RoundProcesses(member, workers, (numel, address), expected=(workers - 1) / 2) as processes,
    ):
        yield processes


def member(
    rank: int, numel: int, address: ServiceAddress
) -> tuple[Callable[[], None], torch.Tensor]:
    """Returns what a worker does in a round, and what it contributes."""
    vector = torch.empty(numel)
    client = AveragerClient(address, rank, FULL_PRECISION)
    layout = (Segment("parameters", torch.float32, numel),)
    client.start(ShardStatistics(rows=64, columns=()), [vector], layout)
    steps = itertools.count(1)

    def take_part() -> None:
        client.exchange(
            [vector],
            WindowReport(
                rank=rank,
                epoch=1,
                step=next(steps),
                examples=64,
                loss_sum=0.0,
                last=False,
            ),
        )

    return take_part, vector
