"""A fit's Params as text: what a person would have written, and nothing that differs by chance."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from every_row import every
from torch import nn

from sparkdl import ParameterAveraging, TorchEstimator
from sparkdl.callbacks import EarlyStopping
from sparkdl.estimator.params.settings import LONGEST, described, settings_of


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no")


@every(
    ("value", "expected"),
    [
        (3, 3),
        (None, None),
        (True, True),
        ("x" * 1000, "x" * LONGEST),
        (partial(torch.optim.SGD, lr=0.1), "SGD(lr=0.1)"),
        (torch.optim.Adam, "Adam"),
        (nn.Sequential(nn.Linear(1, 1)), "Sequential"),
        (["a", "b"], "['a', 'b']"),
        ([EarlyStopping(patience=2)], None),
        (object(), "object"),
        (Unspeakable(), "Unspeakable"),
    ],
)
def test_a_value_is_described_as_it_was_written(value: Any, expected: Any) -> None:
    found = described(value)
    if isinstance(value, list) and expected is None:
        assert "EarlyStopping(" in str(found)
        assert "patience=2" in str(found)
        return
    assert found == expected


def test_every_param_is_there_and_says_the_same_each_time() -> None:
    def made() -> dict[str, object]:
        return settings_of(
            TorchEstimator(
                model=nn.Linear(2, 1),
                loss=nn.MSELoss(),
                optimizer=partial(torch.optim.SGD, lr=0.5),
                learningRate=0.25,
                strategy=ParameterAveraging(period=3),
            )
        )

    settings = made()
    assert settings == made()
    assert (settings["batchSize"], settings["learningRate"]) == (32, 0.25)
    assert settings["loss"] == "MSELoss"
    assert "period=3" in str(settings["strategy"])
    assert set(settings) >= {"epochs", "seed", "featuresCol", "model", "optimizer"}
