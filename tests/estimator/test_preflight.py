"""What the driver keeps of a model that it only tries out."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from frames import CLASSES, WIDTH, estimator, frame
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.errors import DataError
from sparkdl.estimator.preflight import Preflight
from sparkdl.feed.facts import ColumnFacts, DataFacts


def test_the_replica_that_was_tried_out_is_gone_before_training(spark: SparkSession) -> None:
    built: list[weakref.ref[nn.Module]] = []

    class Tried(Preflight):
        def check(self, facts: DataFacts) -> None:
            built.append(weakref.ref(self._replica.module))
            super().check(facts)

    ready = Tried(estimator(), frame(spark, partitions=2))
    features = ColumnFacts(shortest=WIDTH, longest=WIDTH)
    label = ColumnFacts(smallest=0, largest=CLASSES - 1)
    ready.check(DataFacts((30, 30), (features, label)))

    gc.collect()
    assert built[0]() is None


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
    ready = Preflight(estimator(), frame(spark, partitions=2))
    ready._replica.rebuild_optimizer(lambda build, parameters: Counting(parameters, lr=0.1))
    ready._replica._build_optimizer = partial(Counting, lr=0.1)
    features = ColumnFacts(shortest=WIDTH, longest=WIDTH)
    label = ColumnFacts(smallest=0, largest=CLASSES - 1)
    ready.check(DataFacts((5, 5), (features, label), pending=(0, 1)))
    assert steps == 1
    with pytest.raises(DataError, match=f"but the model has {CLASSES} outputs"):
        ready.check(DataFacts((9,), (features, replace(label, largest=CLASSES)), pending=(0,)))
    ready.check(DataFacts((30, 30), (features, label)))
    assert steps == 1
    assert not hasattr(ready, "_replica")
