"""Averagers and runs whose options tests name one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sparkdl import driver
from sparkdl.averager import Averager
from sparkdl.averager.coordination.run_state import Restart, RunSpec
from sparkdl.averager.run_events import Progress, WorkerState
from sparkdl.averager.service.saving import CheckpointPlan, Snapshot
from sparkdl.averager.service.server import EdgeOptions
from sparkdl.averager.values.center import Center, CenterSpec
from sparkdl.averager.values.center_update import CenterUpdate, Memory, ReplaceByMean
from sparkdl.averager.values.wire_format import WireFormat
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Launch, Observers, Outcome, RunOptions
from sparkdl.driver.resizing import Slots
from sparkdl.protocols import Layout
from sparkdl.worker import Job


def open_averager(
    layout: Layout,
    center: Sequence[Tensor],
    world_size: int,
    wire_format: WireFormat,
    *,
    fragments: int = 1,
    plan: CheckpointPlan | None = None,
    progress: Progress | None = None,
    kept: Mapping[int, WorkerState] | None = None,
    host: str = "127.0.0.1",
    advertised_host: str | None = None,
    tls: bool = False,
    now: Callable[[], float] = time.monotonic,
    **spec: Any,
) -> Averager:
    """An averager; ``spec`` is more of its ``RunSpec``."""
    return Averager(
        RunSpec(world_size=world_size, checkpoints=plan, **spec),
        CenterSpec(layout=layout, wire_format=wire_format, fragments=fragments),
        Snapshot(center=center, restart=Restart(progress=progress, kept=kept or {})),
        EdgeOptions(host=host, advertised_host=advertised_host, tls=tls, now=now),
    )


def center_of(
    layout: Layout,
    values: Sequence[Tensor],
    world_size: int,
    wire_format: WireFormat,
    update: CenterUpdate | None = None,
    memory: Memory | None = None,
) -> Center:
    """A center; by default the mean replaces it."""
    spec = CenterSpec(layout=layout, wire_format=wire_format, update=update or ReplaceByMean())
    return Center(spec, values, world_size, memory)


def run(
    job: Job,
    world_size: int,
    launch: Launch,
    *,
    checkpoints: CheckpointPolicy | None = None,
    slots: Slots | None = None,
    now: Callable[[], float] = time.monotonic,
    **observers: Any,
) -> Outcome:
    """``driver.run``; ``observers`` are those of its ``Observers``."""
    edge = EdgeOptions(now=now)
    options = RunOptions(checkpoints=checkpoints, edge=edge, slots=slots)
    return driver.run(job, world_size, launch, options, Observers(**observers))
