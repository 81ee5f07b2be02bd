"""What a contribution weighs, and whom it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
from by_keyword import open_averager
from crew import WAIT_S, crew
from crew import window as crew_window
from every_row import every
from torch import Tensor

from sparkdl.averager.client.client import AveragerClient
from sparkdl.averager.service.server import Averager
from sparkdl.averager.values import replica_codec
from sparkdl.averager.values.wire_format import BFloat16Changes, FullPrecision, WireFormat
from sparkdl.errors import NonFiniteError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics, ShardStatistics
from sparkdl.protocols import Segment

LAYOUT = (Segment("parameters", torch.float32, 3),)
DEADLINE_S = 10.0


def window(rank: int, **fields: object) -> WindowReport:
    given = {"examples": 2, "loss_sum": 1.0, "last": True, **fields}
    return WindowReport(rank=rank, epoch=1, step=1, **given)  # type: ignore[arg-type]


@contextmanager
def three_workers() -> Iterator[tuple[Averager, list[AveragerClient]]]:
    """An averager whose center is zero, and three workers that have started."""
    with ExitStack() as stack:
        averager = stack.enter_context(
            open_averager(LAYOUT, [torch.zeros(3)], 3, FullPrecision(), deadline_s=DEADLINE_S)
        )
        clients = [
            stack.enter_context(AveragerClient(averager.address, rank, FullPrecision()))
            for rank in range(3)
        ]

        def begin() -> None:
            assert isinstance(next(averager.events()), DataStatistics)
            averager.start()

        at_once(
            begin,
            *[
                lambda client=client: client.start(ShardStatistics(2, ()), [torch.zeros(3)], LAYOUT)
                for client in clients
            ],
        )
        yield averager, clients


def at_once(*calls: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result(timeout=DEADLINE_S)


def exchange(clients: list[AveragerClient], windows: list[WindowReport]) -> list[list[float]]:
    """Rank r contributes r + 1 three times; what all have afterwards."""
    states: list[Tensor] = [torch.full((3,), float(rank + 1)) for rank in range(3)]
    at_once(
        *[
            lambda c=client, s=state, w=report: c.exchange([s], w)
            for client, state, report in zip(clients, states, windows, strict=True)
        ]
    )
    return [state.tolist() for state in states]


def test_a_contribution_weighs_what_it_stands_for() -> None:
    with three_workers() as (_, clients):
        windows = [window(0, group_weight=6), window(1, group_weight=0), window(2)]
        # (6 * 1 + 2 * 3) / 8
        assert exchange(clients, windows) == [[1.5] * 3] * 3


def test_examples_and_losses_are_counted_where_they_happened() -> None:
    with three_workers() as (averager, clients):
        exchange(
            clients, [window(0, group_weight=4, examples=1), window(1, group_weight=0), window(2)]
        )
        events = averager.events()
        windows = [next(events) for _ in range(3)]
        assert [event.examples for event in windows if isinstance(event, WindowReport)] == [1, 2, 2]
        summary = next(events)
        assert isinstance(summary, EpochSummary)
        assert (summary.examples, summary.loss) == (5, 0.6)


@every("wire_format", [FullPrecision(), BFloat16Changes()])
def test_rounds_without_any_weight_change_nothing(wire_format: WireFormat) -> None:
    def exchanged(step: int, value: float, **fields: object) -> list[list[float]]:
        rounds = [
            workers.exchange(crew_window(rank, step, **fields), value)  # type: ignore[arg-type]
            for rank in range(2)
        ]
        return [reply.result(WAIT_S) for reply in rounds]

    with crew(2, wire_format=wire_format, center=1.0) as workers:
        assert exchanged(1, 7.0, examples=0) == [[1.0] * 3] * 2
        assert exchanged(2, 3.0) == [[3.0] * 3] * 2
        assert exchanged(3, 7.0, examples=0) == [[3.0] * 3] * 2
        assert exchanged(4, 7.0, group_weight=0) == [[3.0] * 3] * 2
        assert exchanged(5, 4.0, last=True) == [[4.0] * 3] * 2


@every("bad", [math.nan, math.inf, -math.inf])
@every("rank", [0, 1])
@every("wire_format", [FullPrecision(), BFloat16Changes()])
def test_what_is_not_finite_never_reaches_the_center_and_is_said_whose_it_is(
    wire_format: WireFormat, rank: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker looks at what it sends; one that does not know how to still has the token."""
    monkeypatch.setattr(replica_codec, "require_finite", lambda values, report: None)
    with crew(2, wire_format=wire_format, center=1.0) as workers:
        workers.exchange(crew_window(rank, 4), bad)
        workers.exchange(crew_window(1 - rank, 4), 2.0)
        error = workers.outcome.exception(WAIT_S)
        assert isinstance(error, NonFiniteError)
        assert (error.rank, error.epoch, error.step) == (rank, 1, 4)
        assert f"rank {rank} has 3 NaN or infinite values" in str(error)
        assert workers.averager.center[0].tolist() == [1.0] * 3
