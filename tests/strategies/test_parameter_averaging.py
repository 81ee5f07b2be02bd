"""ParameterAveraging: rounds, the algorithm by hand, what is sent, and among executors."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from every_row import every, every_row
from hypothesis import given, settings
from hypothesis import strategies as st
from interruptions import same_bits
from misbehaving import Kills, Overflows, marked
from torch import Tensor, nn
from toys import (
    Data,
    average_by_hand,
    classification,
    enough_rows,
    make_job,
    mlp,
    relative_error,
    schema,
)

from sparkdl.averager import AveragerClient
from sparkdl.averager.run_events import RunEvent as Event
from sparkdl.averager.run_events import WorkerTimes
from sparkdl.driver import Outcome
from sparkdl.errors import NonFiniteError, TrainingError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": partial(torch.optim.Adam, lr=0.02),
    "adamw": partial(torch.optim.AdamW, lr=0.02),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


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
@every("sizes", [[28, 8, 17], [0, 12, 30]])
@every("optimizer", [OPTIMIZERS["momentum"], OPTIMIZERS["adam"]])
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


# Among the executors

HOSTS = ["a", "b", "a"]


def averaged(aggregation: Any, data: Data, model: nn.Module, **changes: Any) -> Outcome:
    """Two epochs; every other rank is on another host."""
    settings = {"period": 3, **changes.pop("strategy", {})}
    strategy = ParameterAveraging(aggregation=aggregation, **settings)
    job = make_job(model, strategy=strategy, epochs=2, **changes)
    hosts = HOSTS[: len(data.sizes)]
    ranks_as: Any = "threads" if aggregation == "driver" else "processes"
    return run_world(job, data.shards(), ranks_as=ranks_as, hosts=hosts)


def require_one_center(data: Data, model: nn.Module, **changes: Any) -> list[Outcome]:
    """What comes of each way to average, of which all give the center of the driver."""
    driver, *others = (
        averaged(where, data, model, **changes) for where in ("driver", "executors", "hierarchical")
    )
    for outcome in others:
        assert relative_error(outcome.module, driver.module) <= 1e-12
    return [driver, *others]


@pytest.mark.nightly_variants(daily=3)
@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize(
    "sizes",
    [[24, 24], [31, 18, 26], [0, 17], [13, 0, 2]],
    ids=["equal", "unequal", "first-empty", "last-short"],
)
def test_every_aggregation_gives_the_center_of_the_driver(name: str, sizes: list[int]) -> None:
    data = classification(sizes)
    driver, *others = require_one_center(data, mlp(), optimizer=OPTIMIZERS[name])
    for outcome in others:
        for mine, other in zip(outcome.history, driver.history, strict=True):
            assert mine.examples == other.examples == sum(sizes)
            assert mine.loss == pytest.approx(other.loss, rel=1e-12)


def test_optimizer_state_can_stay_with_its_worker() -> None:
    data = classification([31, 18, 9])
    strategy = {"average_optimizer_state": False}
    require_one_center(data, mlp(), optimizer=OPTIMIZERS["momentum"], strategy=strategy)


def test_batch_norm_statistics_and_its_counter_are_those_of_the_driver() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    data = classification([32, 20, 12])
    outcomes = require_one_center(data, model)
    counted = {int(each.module.get_buffer("1.num_batches_tracked")) for each in outcomes}
    assert len(counted) == 1


@every("aggregation", ["executors", "hierarchical"])
def test_the_same_seed_and_data_give_the_same_bits(aggregation: str) -> None:
    data = classification([31, 18, 26])
    first, second = (averaged(aggregation, data, mlp()) for _ in range(2))
    assert same_bits(first, second)


def test_one_worker_takes_the_same_path_alone() -> None:
    data = classification([23])
    driver, *others = require_one_center(data, mlp())
    assert all(same_bits(outcome, driver) for outcome in others)


def test_one_worker_of_each_host_speaks_to_the_driver() -> None:
    job = make_job(mlp(), strategy=ParameterAveraging(period=2, aggregation="hierarchical"))
    windows: list[WindowReport] = []

    def note(event: object) -> None:
        if isinstance(event, WindowReport):
            windows.append(event)

    data = classification([16, 9, 16])
    run_world(job, data.shards(), ranks_as="processes", hosts=HOSTS, on_event=note)

    # Four minibatches a rank on host a, three on host b: two windows each.
    weights = [(window.rank, window.weight) for window in windows]
    assert sorted(weights) == [(0, 16), (0, 16), (1, 1), (1, 8), (2, 0), (2, 0)]
    assert [sum(w.examples for w in windows if w.rank == rank) for rank in range(3)] == [16, 9, 16]


def test_changes_rounded_to_bfloat16_travel_between_hosts_and_driver() -> None:
    data = classification([24, 24, 24])
    exact, rounded = (
        averaged("hierarchical", data, mlp(), strategy={"wire_dtype": wire})
        for wire in ("float32", "bfloat16")
    )
    assert 0 < relative_error(rounded.module, exact.module) <= 1e-2


@every_row(("executors", 1), ("hierarchical", 3))
def test_values_that_are_not_finite_are_reported_with_the_rank_that_made_them(
    aggregation: str, period: int
) -> None:
    data = marked([12, 12, 12], 24 + 5)  # step 2 of rank 2, who is not the first of its host
    with pytest.raises(NonFiniteError, match=r"rank 2 has .* NaN or infinite") as caught:
        averaged(aggregation, data, Overflows(), strategy={"period": period})
    window_ends = min(3, -(-2 // period) * period)
    assert (caught.value.rank, caught.value.epoch, caught.value.step) == (2, 1, window_ends)


@every("aggregation", ["executors", "hierarchical"])
def test_who_has_no_rows_left_is_not_blamed_for_what_others_sent(aggregation: str) -> None:
    data = marked([4, 12, 4], 4 + 5)  # of rank 1, behind the last window of the others
    with pytest.raises(NonFiniteError) as caught:
        averaged(aggregation, data, Overflows(), strategy={"period": 1})
    assert caught.value.rank == 1


def test_a_worker_that_dies_ends_the_run_by_name_where_no_loss_is_allowed() -> None:
    with pytest.raises(TrainingError, match="rank 2"):
        averaged("hierarchical", marked([12, 12, 12], 24 + 5), Kills(), max_failures=0)


@every_row(*((name, True) for name in OPTIMIZERS), ("adam", False))
def test_averaging_with_tails_equals_the_algorithm_by_hand(name: str, averaged: bool) -> None:
    data = classification([31, 18, 26])  # 8, 5 and 7 batches of 4: tails of 2, 2 and 1 steps
    optimizer = OPTIMIZERS[name]
    strategy = ParameterAveraging(period=3, average_optimizer_state=averaged)

    outcome = run_world(
        make_job(mlp(), optimizer=optimizer, strategy=strategy, epochs=3), data.shards()
    )

    oracle = average_by_hand(
        mlp(), optimizer, data, period=3, epochs=3, batch_size=4, average_optimizer_state=averaged
    )
    assert relative_error(outcome.module, oracle) <= 1e-9


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(enough_rows),
    period=st.integers(1, 5),
    batch_size=st.integers(1, 8),
    averaged=st.booleans(),
)
def test_any_shards_and_period_equal_the_algorithm_by_hand(
    sizes: list[int], period: int, batch_size: int, averaged: bool
) -> None:
    data = classification(sizes)
    optimizer = OPTIMIZERS["momentum"]
    strategy = ParameterAveraging(period=period, average_optimizer_state=averaged)

    outcome = run_world(
        make_job(mlp(), optimizer=optimizer, strategy=strategy, epochs=2, batch_size=batch_size),
        data.shards(),
    )

    oracle = average_by_hand(
        mlp(),
        optimizer,
        data,
        period=period,
        epochs=2,
        batch_size=batch_size,
        average_optimizer_state=averaged,
    )
    assert relative_error(outcome.module, oracle) <= 1e-9
