"""The weights of rows that a model is evaluated on, as an executor reads them."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from sparkdl.errors import DataError
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.evaluation import _weights

WEIGHT = ColumnSpec("w", torch.float32)


def test_weights_are_numbers_of_any_type() -> None:
    for numbers in (pa.array([2.0, 0.0]), pa.array([2, 0], pa.int16())):
        assert _weights(numbers, WEIGHT).tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, "column 'w' has 1 null"),
        (-1.0, "'w' holds -1; weights are numbers >= 0"),
        (float("nan"), "'w' holds nan"),
        (float("inf"), "'w' holds inf"),
    ],
)
def test_a_weight_that_weighs_nothing_meaningful_is_refused(wrong: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        _weights(pa.array([1.0, wrong], pa.float32()), WEIGHT)
