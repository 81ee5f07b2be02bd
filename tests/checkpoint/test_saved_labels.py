"""Labels, loss and metrics of a saved model: read back as they were, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Net
from torch import nn

from sparkdl.checkpoint.module_files import SavedModule, read_module, write_module
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary
from sparkdl.protocols import ColumnSpec

METRICS = {"auroc": 0.5, "recall": [0.25, float("inf")], "by": {"a": 1.0}}
LABELS = (ColumnSpec("y", torch.float32, (3,)),)


def saved(directory: Path, loss: Any = None) -> SavedModule:
    epoch = EpochSummary(epoch=1, loss=0.5, examples=3, rounds=1, seconds=0.5, metrics=METRICS)
    module = SavedModule(
        module=Net(),
        builder=Net,
        features=[ColumnSpec("x", torch.float32, (4,))],
        head="logits",
        widths={None: 3},
        history=[epoch],
        labels=LABELS,
        loss=loss,
    )
    write_module(module, directory)
    return module


def test_they_are_read_back_and_torch_s_losses_need_no_trust(tmp_path: Path) -> None:
    wrote = saved(tmp_path, nn.CrossEntropyLoss(label_smoothing=0.25))
    found = read_module(tmp_path, trust=["models"])
    assert found.history == wrote.history
    assert found.labels == LABELS
    assert found.loss.label_smoothing == 0.25


def test_a_loss_of_one_s_own_needs_trust(tmp_path: Path) -> None:
    saved(tmp_path, lambda outputs, targets: outputs - targets)
    with pytest.raises(ConfigError, match="loss was saved as a pickle"):
        read_module(tmp_path, trust=["models"])
    assert read_module(tmp_path, trust=True).loss(3, 1) == 2


def test_what_cannot_be_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for number, (changes, words) in enumerate(
        [
            ({"labels": None}, "it has no list of labels"),
            ({"labels": [{"name": "y"}]}, "an entry of labels is invalid"),
            (
                {"labels": [{"name": "y", "dtype": "os", "row_shape": []}]},
                "an entry of labels is invalid",
            ),
            ({"loss": {"recipe": {"import": "os:system"}}}, "not torch's own"),
            (
                {"loss": {"recipe": {"import": "torch.optim.sgd:SGD"}}},
                "loss must be an nn.Module or",
            ),
            ({"loss": []}, "which is not an object spec"),
        ]
    ):
        with subtests.test(changes=changes, words=words):
            directory = tmp_path / str(number)
            directory.mkdir()
            saved(directory)
            path = directory / "module.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
            with pytest.raises(ConfigError, match=words):
                read_module(directory, trust=["models"])


def test_metrics_that_are_no_numbers_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for number, value in enumerate([3, [1.0], {"a": "text"}, {"a": None}, {"a": [{"b": "c"}]}]):
        with subtests.test(value=value):
            directory = tmp_path / str(number)
            directory.mkdir()
            saved(directory)
            path = directory / "module.json"
            description = json.loads(path.read_text())
            description["history"][0]["metrics"] = value
            path.write_text(json.dumps(description))
            with pytest.raises(
                ConfigError, match="an entry of history is invalid: metrics cannot be"
            ):
                read_module(directory, trust=["models"])
