"""ParameterAveraging: arguments, when rounds happen, determinism, and the bfloat16 wire."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from by_keyword import open_averager
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import (
    classification,
    drive,
    enough_rows,
    make_job,
    mlp,
    relative_error,
    schema,
    sgd_on_union,
)

from sparkdl.averager import AveragerClient, ServiceAddress
from sparkdl.averager.messages.run_events import RunEvent as Event
from sparkdl.averager.messages.run_events import WorkerTimes
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics, ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.02)


@settings(max_examples=12, deadline=None)
@given(
    batches=st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(
        lambda batches: enough_rows([2 * n for n in batches])
    ),
    period=st.integers(1, 4),
)
def test_rounds_come_every_period_and_once_for_the_tail(batches: list[int], period: int) -> None:
    windows: list[WindowReport] = []
    job = make_job(mlp(), strategy=ParameterAveraging(period=period), batch_size=2, epochs=2)

    outcome = run_world(
        job,
        classification([2 * n for n in batches]).shards(),
        on_event=lambda e: windows.append(e) if isinstance(e, WindowReport) else None,
    )

    for rank, number in enumerate(batches):
        for epoch in (1, 2):
            mine = [w for w in windows if (w.rank, w.epoch) == (rank, epoch)]
            full, tail = divmod(number, period)
            sizes = [2 * period] * full + [2 * tail] * (tail > 0)
            assert [w.examples for w in mine] == (sizes or [0])
            assert [w.last for w in mine] == [False] * (len(mine) - 1) + [True]
            assert mine[-1].step == epoch * number
    rounds = max(-(-number // period) for number in batches)
    assert [row.rounds for row in outcome.history] == [rounds, rounds]


def test_events_are_statistics_then_windows_times_and_a_summary_an_epoch_as_in_history() -> None:
    events: list[Event] = []
    outcome = run_world(
        make_job(mlp(), epochs=3), classification([8, 4]).shards(), on_event=events.append
    )
    assert isinstance(events[0], DataStatistics)
    assert events[0].shard_rows == (8, 4)
    assert all(isinstance(e, WindowReport | EpochSummary | WorkerTimes) for e in events[1:])
    assert [e for e in events if isinstance(e, EpochSummary)] == outcome.history
    assert [row.epoch for row in outcome.history] == [1, 2, 3]
    assert all(row.examples == 12 for row in outcome.history)


def test_the_loss_of_an_epoch_is_the_mean_over_its_rows() -> None:
    """Without learning, every row's loss is that of the initial model."""
    data = classification([9, 5])
    model = mlp()
    job = make_job(model, optimizer=partial(torch.optim.SGD, lr=0.0))

    outcome = run_world(job, data.shards())

    loss = nn.functional.cross_entropy(
        model(torch.from_numpy(data.features)), torch.from_numpy(data.targets)
    )
    assert outcome.history[0].loss == pytest.approx(loss.item(), rel=1e-12)


def test_the_size_of_spark_record_batches_does_not_matter() -> None:
    job = make_job(mlp(), epochs=2, batch_size=5)
    data = classification([17, 11])
    states = [run_world(job, data.shards(rows)).module.state_dict() for rows in (1, 4, 100)]
    for key in states[0]:
        assert torch.equal(states[0][key], states[1][key])
        assert torch.equal(states[0][key], states[2][key])


def final_replicas(monkeypatch: pytest.MonkeyPatch, job: Any, shards: Any) -> tuple[Any, Any]:
    """Run, and return the outcome with each rank's flat state as it was when it left."""
    states: dict[int, list[Tensor]] = {}
    lock = threading.Lock()
    exchange = AveragerClient.exchange

    def recorded(self: AveragerClient, segments: Any, window: WindowReport) -> None:
        exchange(self, segments, window)
        with lock:
            states[window.rank] = [segment.clone() for segment in segments]

    monkeypatch.setattr(AveragerClient, "exchange", recorded)
    return run_world(job, shards), states


@every("wire_dtype", ["float32", "bfloat16"])
@every("sizes", [[16, 16, 16], [28, 8, 17], [0, 12, 30]])
@every("optimizer", [MOMENTUM, ADAM])
def test_every_replica_ends_with_the_bits_of_the_center(
    monkeypatch: pytest.MonkeyPatch, wire_dtype: Any, sizes: list[int], optimizer: Any
) -> None:
    job = make_job(
        mlp().float(),
        strategy=ParameterAveraging(period=2, wire_dtype=wire_dtype),
        optimizer=optimizer,
        schema=schema(dtype=torch.float32),
        epochs=2,
    )
    outcome, states = final_replicas(monkeypatch, job, classification(sizes).shards())

    center = torch.cat([p.detach().reshape(-1) for p in outcome.module.parameters()])
    for state in states.values():
        assert torch.equal(state[0], center)
        for mine, other in zip(state, states[0], strict=True):
            assert torch.equal(mine, other)


@every("sizes", [[16, 16], [28, 9]])
def test_bfloat16_ends_close_to_float32(sizes: list[int]) -> None:
    data = classification(sizes)
    job = partial(make_job, mlp(), epochs=4, batch_size=4)
    outcome = run_world(
        job(strategy=ParameterAveraging(period=1, wire_dtype="bfloat16")), data.shards()
    )
    oracle = sgd_on_union(mlp(), data, epochs=4)
    start = mlp()
    moved = max(
        float((p - q).detach().abs().max())
        for p, q in zip(oracle.parameters(), start.parameters(), strict=True)
    )
    for mine, other in zip(outcome.module.parameters(), oracle.parameters(), strict=True):
        # each round rounds the change to 8 bits, and rounding errors do not add up
        assert float((mine - other).detach().abs().max()) <= moved / 64
    assert relative_error(outcome.module, oracle) > 0


class Constant(nn.Module):
    """Its one parameter starts at 1 and its gradient is 1 at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(1))

    def forward(self, features: Tensor) -> Tensor:
        return self.value.expand(len(features))


def the_value(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def test_bfloat16_does_not_lose_updates_that_are_tiny_beside_the_parameter() -> None:
    """1 - 1e-4 is 1 in bfloat16; fifty such steps are 0.995."""
    job = make_job(
        Constant(),
        loss=the_value,
        optimizer=partial(torch.optim.SGD, lr=1e-4),
        strategy=ParameterAveraging(period=1, wire_dtype="bfloat16"),
        schema=schema(dtype=torch.float32),
        batch_size=1,
        epochs=2,
    )
    outcome = run_world(job, classification([25, 25]).shards())
    value = next(outcome.module.parameters()).item()
    assert value == pytest.approx(1 - 50e-4, abs=2e-5)


@every("wire_dtype", ["float32", "bfloat16"])
def test_rounds_without_any_rows_leave_every_replica_at_the_initial_model(wire_dtype: Any) -> None:
    """Such a run is refused by the driver; the rounds themselves have to bear it."""
    strategy = ParameterAveraging(wire_dtype=wire_dtype)
    initial = torch.arange(5.0) / 7
    layout = (Segment("parameters", torch.float32, 5),)
    states = {rank: torch.full((5,), -1.0) for rank in range(2)}

    def work(rank: int, address: ServiceAddress) -> None:
        with AveragerClient(address, rank, strategy.wire_format, deadline_s=60) as client:
            client.start(ShardStatistics(0, ()), [states[rank]], layout)
            for epoch in (1, 2):
                window = WindowReport(
                    rank=rank, epoch=epoch, step=0, examples=0, loss_sum=0.0, last=True
                )
                client.exchange([states[rank]], window)
            client.finish()

    with (
        open_averager(
            layout, [initial.clone()], 2, strategy.wire_format, deadline_s=60
        ) as averager,
        ThreadPoolExecutor(2) as pool,
    ):
        workers = [pool.submit(work, rank, averager.address) for rank in states]
        drive(averager)
        for worker in workers:
            worker.result(timeout=60)
        assert torch.equal(averager.center.values[0], initial)
    assert all(torch.equal(state, initial) for state in states.values())


def test_the_initial_center_is_the_given_model() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    job = make_job(model, optimizer=partial(torch.optim.SGD, lr=0.0))
    outcome = run_world(job, classification([4, 4]).shards())
    for state in (outcome.module.state_dict(), model.state_dict()):
        assert all(torch.equal(state[key], before[key]) for key in before)
