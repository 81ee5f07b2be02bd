"""Time of a round with a head on a frozen backbone, against a round with the head alone.

Two workers, each with its replica: 25 M float32 parameters that require no gradient, in 200
tensors, below a head of 100 k that is trained. The clock runs from the start until both have the
new center, and includes the check of what must not change. Rounds are interleaved. The time of a
check of every frozen value, once per epoch and worker, is shown beside them.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import harness
import torch
from averager_rounds import let_start
from round_processes import RoundProcesses
from torch import nn

from sparkdl.averager.client.client import AveragerClient
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.service.server import Averager, AveragerSpec
from sparkdl.averager.service.snapshot import Snapshot
from sparkdl.averager.values.center import CenterSpec
from sparkdl.averager.values.wire_format import FullPrecision
from sparkdl.driver import build_replica, initial_center
from sparkdl.events import WindowReport
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.replica import Replica
from sparkdl.transport.connecting import ServiceAddress

WORKERS = 2
WIDTH, LAYERS, CLASSES = 500, 100, 200
TARGET = 1.05


def main() -> None:
    """Measures and reports."""
    chosen = harness.arguments(__doc__, repeats=500, quick_repeats=100)
    with _rounds(LAYERS) as frozen, _rounds(0) as alone:
        turns = {"head on a frozen backbone": frozen.round, "head alone": alone.round}
        measured = harness.interleave(turns, repeats=chosen.repeats, warmups=20)
    medians = {
        name: harness.show(name, [1e3 * each for each in seconds], unit="ms")
        for name, seconds in measured.items()
    }
    replica = _replica(LAYERS)
    looks = [_seconds(replica.frozen.require_unchanged) for _ in range(5)]
    harness.show("a look at every frozen value", [1e3 * each for each in looks], unit="ms")
    claim = harness.Claim(
        name=f"a round of 100,200 parameters on {replica.frozen.numel:,} frozen ones / alone",
        ratio=medians["head on a frozen backbone"] / medians["head alone"],
        target=TARGET,
    )
    detail = {"median_milliseconds": medians, "look_at_every_value_seconds": looks}
    harness.report("frozen_backbone", [claim], detail)


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _replica(layers: int) -> Replica:
    """A head on a number of frozen layers."""

    def build() -> nn.Module:
        backbone = [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(layers)]
        return nn.Sequential(*backbone, nn.Linear(WIDTH, CLASSES))

    return build_replica(build, partial(torch.optim.SGD, lr=0.1), nn.CrossEntropyLoss(), 0)


@contextmanager
def _rounds(layers: int) -> Iterator[RoundProcesses]:
    replica = _replica(layers)
    layout, center = initial_center(replica, with_optimizer=False)
    frozen = replica.frozen.fingerprint
    spec = AveragerSpec(
        run=RunSpec(world_size=WORKERS, frozen=frozen),
        center=CenterSpec(layout=layout, wire_format=FullPrecision()),
    )
    with Averager(spec, Snapshot(center=center)) as averager:
        let_start(averager)
        given = layers, averager.address
        with RoundProcesses(_member, WORKERS, given, expected=(WORKERS - 1) / 2) as processes:
            yield processes


def _member(
    rank: int, layers: int, address: ServiceAddress
) -> tuple[Callable[[], None], torch.Tensor]:
    replica = _replica(layers)
    client = AveragerClient(address, rank, FullPrecision(), frozen=replica.frozen.fingerprint)
    segments = partial(replica.segments, with_optimizer=False)
    client.start(ShardStatistics(64, ()), segments(), replica.layout(with_optimizer=False))
    steps = itertools.count(1)

    def take_part() -> None:
        step = next(steps)
        report = WindowReport(
            rank=rank, epoch=1, step=step, examples=64, loss_sum=0.0, last=False, step_of_epoch=step
        )
        client.exchange(segments(), report)

    (vector,) = segments()
    return take_part, vector


if __name__ == "__main__":
    main()
