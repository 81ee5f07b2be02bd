"""Rounds of sparkdl's averager: the service in this process, which is the driver, plus workers."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from round_processes import RoundProcesses

from sparkdl.averager.client.client import AveragerClient
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.service.loop import EdgeOptions
from sparkdl.averager.service.server import Averager, AveragerSpec
from sparkdl.averager.service.snapshot import Snapshot
from sparkdl.averager.values.center import CenterSpec
from sparkdl.averager.values.wire_format import FullPrecision
from sparkdl.events import WindowReport
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.transport.connecting import ServiceAddress


@contextmanager
def averager(workers: int, numel: int, edge: EdgeOptions) -> Iterator[ServiceAddress]:
    """Opens an averager here, which lets the workers start as a driver does; yields its address."""
    layout = (Segment("parameters", torch.float32, numel),)
    with Averager(
        AveragerSpec(
            run=RunSpec(world_size=workers),
            center=CenterSpec(layout=layout, wire_format=FullPrecision()),
        ),
        Snapshot(center=[torch.zeros(numel)]),
        edge,
    ) as opened:

        def start() -> None:
            next(opened.events())  # all have said what their rows are
            opened.start()

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
    client = AveragerClient(address, rank, FullPrecision())
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
