"""Averaging among the executors gives the center that averaging in the driver gives."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from every_row import every
from interruptions import same_bits
from torch import Tensor, nn
from toys import Data, batches_by_hand, classification, make_job, mlp, relative_error

from sparkdl.driver import Outcome
from sparkdl.errors import NonFiniteError, TrainingError
from sparkdl.events import WindowReport
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPTIMIZERS: dict[str, Any] = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.02),
}


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
@pytest.mark.parametrize("name", OPTIMIZERS)
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


def test_two_workers_with_equal_windows_agree_to_the_bit() -> None:
    """Two numbers have one order of addition."""
    data = classification([24, 24])
    driver, executors = (
        averaged(where, data, mlp(), optimizer=OPTIMIZERS["adam"])
        for where in ("driver", "executors")
    )
    assert same_bits(executors, driver)


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


class Marked(nn.Module):
    """Something happens at the row that has a feature of 1e6."""

    def __init__(self, happens: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.inner = mlp()
        self.happens = happens

    def forward(self, features: Tensor) -> Tensor:
        if features.abs().max() >= 1e6:
            self.happens(self)
        outputs: Tensor = self.inner(features)
        return outputs


def diverge(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(float("inf"))


def die(model: nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@every("aggregation", ["executors", "hierarchical"])
@every("period", [1, 2, 3])
def test_values_that_are_not_finite_are_reported_with_the_rank_that_made_them(
    aggregation: str, period: int
) -> None:
    data = classification([12, 12, 12])
    order = batches_by_hand(data, 2, 1, 4)
    data.features[30, 0] = 1e6  # of rank 2, who is not the first of its host
    step = 1 + next(i for i, (features, _) in enumerate(order) if data.features[30, 1] in features)
    with pytest.raises(NonFiniteError, match=r"rank 2 has .* NaN or infinite") as caught:
        averaged(aggregation, data, Marked(diverge), strategy={"period": period})
    window_ends = min(3, -(-step // period) * period)
    assert (caught.value.rank, caught.value.epoch, caught.value.step) == (2, 1, window_ends)


@every("aggregation", ["executors", "hierarchical"])
def test_who_has_no_rows_left_is_not_blamed_for_what_others_sent(aggregation: str) -> None:
    data = classification([4, 12, 4])
    data.features[8:16, 0] = 1e6  # of rank 1, behind the last window of the others
    with pytest.raises(NonFiniteError) as caught:
        averaged(aggregation, data, Marked(diverge), strategy={"period": 1})
    assert caught.value.rank == 1


def test_a_worker_that_dies_ends_the_run_by_name_where_no_loss_is_allowed() -> None:
    data = classification([12, 12, 12])
    data.features[30, 0] = 1e6
    with pytest.raises(TrainingError, match="rank 2"):
        averaged("hierarchical", data, Marked(die), max_failures=0)
