"""What rows weigh in metrics, which take float32."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from every_row import every

from sparkdl.errors import DataError
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.evaluation import _weights

SPEC = ColumnSpec("w", torch.float64)


@every("weight", [1e-46, 1e39, -1.0, float("inf"), float("nan")])
def test_a_weight_that_float32_would_change_beyond_rounding_is_refused_by_name(
    weight: float,
) -> None:
    with pytest.raises(DataError, match="weight column 'w' holds"):
        _weights(pa.array([1.0, weight]), SPEC)


def test_other_weights_are_rounded() -> None:
    found = _weights(pa.array([0.0, 0.1, 1e-40]), SPEC)
    assert found.tolist() == torch.tensor([0.0, 0.1, 1e-40]).tolist()
