"""Models with complex parameters and buffers are trained as others are."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import classification, make_job, sgd_on_union

from sparkdl.averager.values.finite import count_non_finite
from sparkdl.errors import ConfigError
from sparkdl.replica import Replica
from sparkdl.strategies import (
    BSP,
    AsynchronousSGD,
    GradientAllReduce,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    PowerSGD,
    Strategy,
    ThresholdGradientSharing,
)
from sparkdl.strategies.all_reduce.gradient_noise import norms_of
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Wave(nn.Module):
    """The magnitudes of a complex linear map."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map = nn.Linear(6, 3, dtype=torch.complex128)
        self.register_buffer("phase", torch.polar(*torch.ones(2, 1).double()))

    def forward(self, features: Tensor) -> Tensor:
        return (self.map(features.to(torch.complex128)) * self.phase).abs()


DATA = classification([20, 13])


@pytest.mark.parametrize(
    ("strategy", "momentum"),
    [
        (ParameterAveraging(period=1), 0.9),
        (OuterOptimizer(period=1, outer=OuterSGD(1.0, 0.0)), 0.0),
        (AsynchronousSGD(period=1, barrier=BSP()), 0.0),
        (ThresholdGradientSharing(threshold=0), 0.0),
        pytest.param(GradientAllReduce(), 0.9, marks=pytest.mark.nightly),
    ],
    ids=["averaging", "outer", "changes", "sharing", "all_reduce"],
)
def test_in_every_step_they_agree_on_what_one_process_would_have_come_to(
    strategy: Any, momentum: float
) -> None:
    build = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    given = make_job(Wave(), optimizer=build, strategy=strategy, epochs=2, deadline_s=90.0)
    ranks_as: Any = "processes" if strategy.needs.collective else "threads"
    found = run_world(given, DATA.shards(), ranks_as=ranks_as)
    oracle = sgd_on_union(Wave(), DATA, build, epochs=2)
    for mine, other in zip(found.module.parameters(), oracle.parameters(), strict=True):
        assert mine.dtype is torch.complex128
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


class Seen(nn.Linear):
    """Keeps the mean of the rows that it saw last, times 1 + 2i, and how many they were."""

    def __init__(self) -> None:
        super().__init__(6, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(6, dtype=torch.complex128))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int32))
        self.register_buffer("many", torch.zeros(3, dtype=torch.bool))

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.mean = features.mean(0) * (1 + 2j)
            self.rows.fill_(len(features))
            self.many.fill_(len(features) > 15)
        return super().forward(features)


@pytest.mark.parametrize("among", ["threads", pytest.param("processes", marks=pytest.mark.nightly)])
def test_complex_buffers_become_the_mean_over_rows_and_integers_those_of_the_first(
    among: Any,
) -> None:
    strategies: list[Strategy[Any]] = [
        ParameterAveraging(period=1),
        OuterOptimizer(period=1, outer=OuterSGD(1.0, 0.0)),
        AsynchronousSGD(period=1, barrier=BSP()),
        ThresholdGradientSharing(threshold=0),
    ]
    if among == "processes":
        strategies = [GradientAllReduce(), ParameterAveraging(1, aggregation="executors")]
    rows = np.concatenate([DATA.shard(rank)[0] for rank in range(2)])
    for strategy in strategies:
        job = make_job(Seen(), strategy=strategy, epochs=1, batch_size=20, deadline_s=90.0)
        found = run_world(job, DATA.shards(), ranks_as=among).module
        expected = torch.from_numpy(rows.mean(0) * (1 + 2j))
        torch.testing.assert_close(found.mean, expected)
        assert (int(found.rows), found.many.tolist()) == (20, [True] * 3)


def test_their_noise_is_that_of_real_and_imaginary_parts() -> None:
    values = torch.tensor([3 + 4j, 0, 12j])
    assert float(norms_of([values])[0]) == pytest.approx(13)


def test_one_that_is_not_finite_is_found() -> None:
    assert count_non_finite(torch.tensor([1j, complex(0, math.nan), complex(math.inf, 0)])) == 2


def test_their_gradients_are_not_compressed() -> None:
    strategy = GradientAllReduce(compression=PowerSGD(1))
    with pytest.raises(ConfigError, match="has complex parameters"):
        strategy.require_fits(Replica(Wave(), torch.optim.SGD, nn.CrossEntropyLoss()))
