"""What the model and the rest come from is importable on executors that have never seen it."""

from __future__ import annotations

import importlib
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frames import frame
from projects import NET, on_path, write
from pyspark.sql import SparkSession
from torch import nn

import sparkdl
from sparkdl import TorchEstimator, TorchModel
from sparkdl.errors import ConfigError, WorkerError


def estimator(model: Any, **changes: Any) -> TorchEstimator:
    given: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "numWorkers": 2,
        "progress": False,
    }
    return TorchEstimator(**{**given, **changes})


@pytest.mark.usefixtures("elsewhere")
def test_a_model_its_loss_and_its_package_are_found_in_fit_and_transform(
    spark: SparkSession, project: Path
) -> None:
    write(
        project,
        {
            "own_net/__init__.py": "from .model import Net",
            "own_net/model.py": NET
            + "\nfrom own_helper import POWER\nfrom .parts.scale import scaled",
            "own_net/parts/scale.py": "def scaled(x):\n    import own_lazy\n    return own_lazy.scale * x",
            "own_helper.py": "POWER = 3",
            "own_lazy.py": "scale = 2.0",
            "own_losses.py": "import torch\ndef loss(outputs, targets):\n    from own_net.parts.scale import scaled\n    return torch.nn.functional.cross_entropy(scaled(outputs), targets)",
        },
    )
    own_net = importlib.import_module("own_net")
    own_losses = importlib.import_module("own_losses")
    rows = frame(spark)
    model = estimator(own_net.Net, loss=own_losses.loss, outputType="class").fit(rows)
    assert type(model.module) is own_net.Net
    for _ in range(2):
        assert model.transform(rows).select("prediction").count() == rows.count()
        assert len(model.transform(rows).select("prediction").collect()) == rows.count()
