"""A module whose forward changes it predicts the same of the same rows, and is left as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
from every_row import every
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

from sparkdl import TorchModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TRANSFORMS = 4
"""More than executors, so that some Python process predicts twice."""


class CountsInBuffer(nn.Module):
    """Adds to a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.calls.expand(len(x))


class ReplacesBuffer(CountsInBuffer):
    """Puts another tensor in a buffer's place."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.calls.expand(len(x))


class CountsInAttribute(nn.Module):
    """Adds to a number."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.full((len(x),), float(self.calls))


class Remembers(nn.Module):
    """Keeps what it has seen in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return torch.full((len(x),), float(len(self.seen)))


class CountsInLayer(nn.Module):
    """Has a layer that counts, on a parameter that it has to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = CountsInBuffer(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


COUNTING = [CountsInBuffer, ReplacesBuffer, CountsInAttribute, Remembers, CountsInLayer]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    return spark.range(3).selectExpr("double(id) AS features").coalesce(1).cache()


@every("made", COUNTING)
def test_every_transform_begins_with_the_module_as_it_is_here(
    rows: DataFrame, made: Callable[[], nn.Module]
) -> None:
    model = TorchModel.from_module(made(), torch.zeros(1))
    predicted = [
        [row.prediction for row in model.transform(rows).collect()] for _ in range(TRANSFORMS)
    ]
    assert predicted == [[1.0] * 3] * TRANSFORMS


@every("made", COUNTING)
def test_learning_what_a_module_returns_leaves_it_as_it_was(made: Callable[[], nn.Module]) -> None:
    module = made()
    TorchModel.from_module(module, torch.zeros(1))
    assert module(torch.zeros(1)).tolist() == [1.0]


@pytest.mark.slow
def test_a_state_brought_from_the_driver_is_where_every_transform_begins(rows: DataFrame) -> None:
    module = CountsInBuffer()
    model = TorchModel.from_module(module, torch.zeros(1))
    module.calls.fill_(5.0)
    found = {model.transform(rows).first()["prediction"] for _ in range(TRANSFORMS)}  # type: ignore[index]
    assert found == {6.0}


def test_lazy_layers_stay_what_the_example_has_made_of_them() -> None:
    module = nn.LazyLinear(2)
    TorchModel.from_module(module, torch.zeros(1, 3))
    assert module.weight.shape == (2, 3)
