"""Averaging among the executors gives the center that averaging in the driver gives."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from toys import Data, classification, make_job, mlp, relative_error

from sparkdl.driver import Outcome
from sparkdl.errors import ConfigError
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.02),
}


def averaged(aggregation: Any, data: Data, model: nn.Module, **changes: Any) -> Outcome:
    settings = {"period": 3, **changes.pop("strategy", {})}
    strategy = ParameterAveraging(aggregation=aggregation, **settings)
    job = make_job(model, strategy=strategy, epochs=2, **changes)
    return run_world(job, data.shards(), ranks_as="processes")


def same_bits(first: nn.Module, second: nn.Module) -> bool:
    mine, other = first.state_dict(), second.state_dict()
    return all(torch.equal(mine[key], other[key]) for key in other)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "sizes",
    [[24, 24], [31, 18, 26], [0, 17], [13, 0, 2]],
    ids=["equal", "unequal", "first-empty", "last-short"],
)
def test_the_executors_agree_on_the_center_of_the_driver(name: str, sizes: list[int]) -> None:
    data = classification(sizes)
    driver, executors = (
        averaged(where, data, mlp(), optimizer=OPTIMIZERS[name])
        for where in ("driver", "executors")
    )
    assert relative_error(executors.module, driver.module) <= 1e-12
    for mine, other in zip(executors.history, driver.history, strict=True):
        assert mine.examples == other.examples == sum(sizes)
        assert mine.loss == pytest.approx(other.loss, rel=1e-12)


def test_two_workers_with_equal_windows_agree_to_the_bit() -> None:
    """Two numbers have one order of addition."""
    data = classification([24, 24])
    driver, executors = (
        averaged(where, data, mlp(), optimizer=OPTIMIZERS["adam"])
        for where in ("driver", "executors")
    )
    assert same_bits(executors.module, driver.module)


def test_optimizer_state_can_stay_with_its_worker() -> None:
    data = classification([31, 18])
    driver, executors = (
        averaged(
            where,
            data,
            mlp(),
            optimizer=OPTIMIZERS["momentum"],
            strategy={"average_optimizer_state": False},
        )
        for where in ("driver", "executors")
    )
    assert relative_error(executors.module, driver.module) <= 1e-12


def test_batch_norm_statistics_and_its_counter_are_those_of_the_driver() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    data = classification([32, 20])
    driver, executors = (averaged(where, data, model) for where in ("driver", "executors"))
    assert relative_error(executors.module, driver.module) <= 1e-12
    counted = executors.module.get_buffer("1.num_batches_tracked")
    assert counted == driver.module.get_buffer("1.num_batches_tracked")


def test_the_same_seed_and_data_give_the_same_bits_among_executors() -> None:
    data = classification([31, 18, 26])
    first, second = (averaged("executors", data, mlp()).module for _ in range(2))
    assert same_bits(first, second)


def test_one_worker_takes_the_same_path_alone() -> None:
    data = classification([23])
    driver, executors = (averaged(where, data, mlp()) for where in ("driver", "executors"))
    assert same_bits(executors.module, driver.module)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="aggregation must be"):
        ParameterAveraging(aggregation="everywhere")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is for aggregation='driver'"):
        ParameterAveraging(aggregation="executors", wire_dtype="bfloat16")


def test_commits_between_are_for_workers_that_average_among_themselves() -> None:
    with pytest.raises(ConfigError, match="commit_every is for aggregation='executors'"):
        ParameterAveraging(commit_every=5)
