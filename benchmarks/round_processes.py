"""Processes that do something in rounds, started together and timed as one.

``rounds`` has them take part in those of sparkdl's averager, whose service is in this process.
Their clocks agree: ``time.perf_counter`` counts from the machine's start on Linux.
"""

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from sparkdl.averager.client import AveragerClient
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.service.saving import Snapshot
from sparkdl.averager.service.server import Averager, EdgeOptions
from sparkdl.averager.values.center import CenterSpec
from sparkdl.averager.values.wire_format import FULL_PRECISION
from sparkdl.errors import TrainingError
from sparkdl.events import WindowReport
from sparkdl.feed.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.transport.connecting import ServiceAddress

ROUND_TIMEOUT_SECONDS = 120.0

Member = Callable[..., tuple[Callable[[], object], torch.Tensor]]
"""Called as ``member(rank, *arguments)`` in a process of its own. Returns a function that takes
part in one round, and the float32 vector of shape (numel,) that the round averages in place: one
of no numbers if it averages nothing."""


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
        expected: float = 0.0,
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
def averager(workers: int, numel: int, edge: EdgeOptions) -> Iterator[ServiceAddress]:
    """Opens an averager here, which lets the workers start as a driver does; yields its address.

    Args:
        workers: how many contribute.
        numel: number of float32 parameters.
        edge: how it listens.
    """
    layout = (Segment("parameters", torch.float32, numel),)
    with Averager(
        RunSpec(world_size=workers, deadline_s=ROUND_TIMEOUT_SECONDS),
        CenterSpec(layout=layout, wire_format=FULL_PRECISION),
        Snapshot(center=[torch.zeros(numel)]),
        edge,
    ) as opened:

        def drive() -> None:
            events = opened.events()
            next(events)  # all have said what their rows are
            opened.start()
            with contextlib.suppress(TrainingError):  # they end without a word
                for _ in events:
                    pass

        threading.Thread(target=drive, daemon=True).start()
        yield opened.address


class Contributor:
    """A worker, as far as its rounds go.

    Args:
        rank: its number.
        numel: number of float32 parameters.
        address: the averager's.

    Attributes:
        vector: what it contributes, and the average after each round.
    """

    def __init__(self, rank: int, numel: int, address: ServiceAddress) -> None:
        self.vector = torch.empty(numel)
        self._rank, self._step = rank, 0
        self._client = AveragerClient(address, rank, FULL_PRECISION)
        layout = (Segment("parameters", torch.float32, numel),)
        self._client.start(ShardStatistics(rows=64, columns=()), [self.vector], layout)

    def take_part(self, *, last: bool = False) -> None:
        """Takes part in a round."""
        self._step += 1
        window = WindowReport(
            rank=self._rank, epoch=1, step=self._step, examples=64, loss_sum=0.0, last=last
        )
        self._client.exchange([self.vector], window)

    def leave(self) -> None:
        """Takes part in a last round, as all do, so that no other worker misses this one."""
        self.take_part(last=True)
        self._client.finish()


@contextmanager
def rounds(workers: int, numel: int) -> Iterator[RoundProcesses]:
    """Opens an averager here and starts the workers, each in a process of its own.

    Args:
        workers: how many contribute.
        numel: number of float32 parameters.

    Yields:
        The worker processes; each ``round()`` is one round of the averager.
    """
    with (
        averager(workers, numel, EdgeOptions()) as address,
        RoundProcesses(member, workers, (numel, address), expected=(workers - 1) / 2) as processes,
    ):
        yield processes


def member(
    rank: int, numel: int, address: ServiceAddress
) -> tuple[Callable[[], None], torch.Tensor]:
    """Returns what a worker does in a round, and what it contributes."""
    contributor = Contributor(rank, numel, address)
    return contributor.take_part, contributor.vector
