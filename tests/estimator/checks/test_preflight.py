"""What the driver keeps of a model that it only tries out."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from every_row import every
from frames import CLASSES, WIDTH, estimator, frame
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.estimator.checks.preflight import plan_fit
from sparkdl.estimator.checks.row_checks import RowChecks
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.strategies import (
    AdaScale,
    ElasticAveraging,
    GradientAllReduce,
    KFACPreconditioner,
    OneBitAdam,
)


def test_the_replica_that_was_tried_out_is_gone_before_training(spark: SparkSession) -> None:
    plan, replica = plan_fit(estimator(), frame(spark, partitions=2))
    checks = RowChecks(replica, estimator())
    built = weakref.ref(replica.module)
    del replica
    features = ColumnStatistics(shortest=WIDTH, longest=WIDTH)
    label = ColumnStatistics(smallest=0, largest=CLASSES - 1)
    checks.check(plan, DataStatistics((30, 30), (features, label)))

    gc.collect()
    assert built() is None


def test_a_step_is_tried_for_the_first_rows_and_only_the_outputs_for_those_that_arrive_later(
    spark: SparkSession,
) -> None:
    steps = 0

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nonlocal steps
            steps += any(p.grad is not None for p in self.param_groups[0]["params"])
            return super().step(closure)

    # Not given to the estimator, which would have to pickle it.
    plan, replica = plan_fit(estimator(), frame(spark, partitions=2))
    replica.rebuild_optimizer(lambda build, parameters: Counting(parameters, lr=0.1))
    replica._build_optimizer = partial(Counting, lr=0.1)
    checks = RowChecks(replica, estimator())
    features = ColumnStatistics(shortest=WIDTH, longest=WIDTH)
    label = ColumnStatistics(smallest=0, largest=CLASSES - 1)
    checks.check(plan, DataStatistics((5, 5), (features, label), pending=(0, 1)))
    assert steps == 1
    with pytest.raises(DataError, match=f"but the model has {CLASSES} outputs"):
        checks.check(
            plan, DataStatistics((9,), (features, replace(label, largest=CLASSES)), pending=(0,))
        )
    checks.check(plan, DataStatistics((30, 30), (features, label)))
    assert steps == 1
    assert checks._replica is None


class Rateless(torch.optim.Optimizer):
    """Keeps its learning rate to itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None: ...


SIGNS = GradientAllReduce(compression=OneBitAdam(10))
KFAC = GradientAllReduce(preconditioner=KFACPreconditioner())
ADAM = partial(torch.optim.Adam, lr=0.1)


@every(
    ("settings", "words"),
    [
        ({"strategy": SIGNS, "optimizer": partial(torch.optim.SGD, lr=0.1)}, "AdamW, not of SGD"),
        ({"strategy": SIGNS, "optimizer": ADAM, "clipNorm": 1.0}, "Drop clipNorm"),
        ({"strategy": GradientAllReduce(sync_batch_norm=True)}, "has no BatchNorm layer"),
        ({"strategy": AdaScale(), "optimizer": Rateless}, "Rateless has no learning rate"),
        ({"strategy": KFAC, "optimizer": Rateless}, "Rateless has no learning rate.*kl_clip=None"),
        ({"strategy": ElasticAveraging(moving_rate=0.9)}, "is too high for 2 workers"),
    ],
)
def test_a_strategy_that_does_not_go_with_the_rest_is_refused_before_workers_start(
    spark: SparkSession, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_fit(estimator(**settings), frame(spark))


def test_kfac_is_refused_before_workers_start_if_no_layer_is_for_it(spark: SparkSession) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(CLASSES))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return features[:, :1] * self.scale

    with pytest.raises(ModelError, match="Scaled has no Linear or Conv2d layer"):
        plan_fit(estimator(model=Scaled(), strategy=KFAC), frame(spark))
