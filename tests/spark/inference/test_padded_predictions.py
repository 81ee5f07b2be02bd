"""What an executor predicts for rows of unequal length; no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from sparkdl.process.torch_settings import TorchSettings
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding
from sparkdl.spark.inference.predictor import OutputColumn, PredictionSettings, Predictor, Running

ROWS = 23


class Sum(nn.Module):
    """The sum of a row's real tokens and its number, and the width that it was padded to."""

    def forward(self, *, tokens: Tensor, age: Tensor, attention_mask: Tensor) -> Tensor:
        total = (tokens * attention_mask).sum(1) + age
        return torch.stack([total, torch.full_like(total, tokens.shape[1])], dim=1)


def test_predictions_come_in_the_order_of_the_rows_whatever_their_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = np.random.default_rng(2)
    rows = [drawn.integers(1, 9, drawn.integers(0, 20)).tolist() for _ in range(ROWS)]
    ages = drawn.normal(size=ROWS)
    specs = [
        ColumnSpec("tokens", torch.float64, (UNKNOWN,), padding=Padding(5, "attention_mask")),
        ColumnSpec("age", torch.float64),
    ]
    predictor = Predictor(
        model=None,  # type: ignore[arg-type] # it is loaded here
        outputs=[OutputColumn("prediction", None, lambda output: output, wide=True)],
        names=["tokens", "age"],
        as_kwargs=True,
        prediction=PredictionSettings(
            batch_rows=4, device="cpu", dtype=None, compiled=False, double=True
        ),
        settings=TorchSettings.here(),
    )

    @contextmanager
    def running(self: Predictor) -> Iterator[Any]:
        yield Running(self, Sum(), "cpu")

    monkeypatch.setattr(Predictor, "running", running)
    columns = [pa.array(rows, pa.list_(pa.int64())), pa.array(ages)]
    ((found,),) = predictor.predictions(iter([(columns, specs)]))
    totals, widths = np.array(found.to_pylist()).T
    assert np.allclose(totals, [sum(row) + age for row, age in zip(rows, ages, strict=True)])
    # Four rows of about one length at a time, each padded to the longest of the four.
    lengths = sorted(len(row) for row in rows)
    longest = [max(1, *lengths[k : k + 4]) for k in range(0, ROWS, 4)]
    assert sorted(set(widths)) == sorted(set(longest))
