"""What a saved model says of its columns, loss and metrics: it comes back, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every
from models import Net
from torch import nn

from sparkdl.checkpoint.module_files import SavedModule, read_module, write_module
from sparkdl.encodings import PIXELS
from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.scale import Scale
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding

METRICS = {"auroc": 0.5, "recall": [0.25, float("inf")], "by": {"a": 1.0}}
LABELS = (ColumnSpec("y", torch.float32, (3,)),)
PADDED = (
    ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0, "attention_mask")),
    ColumnSpec("events", torch.float32, (UNKNOWN, 3), padding=Padding(-0.5)),
    ColumnSpec("age", torch.float32),
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMAL = Scale(torch.bfloat16, "0..1", MEAN, STD)
SCALED = (
    ColumnSpec("photo", torch.uint8, (3, 8, 9), FITS["pad"], scale=NORMAL),
    ColumnSpec("grey", torch.uint8, (1, 8, 9), PIXELS, scale=Scale(torch.float32, "0..255")),
    ColumnSpec("raw", torch.uint8, (4, 8, 9), FITS["stretch"]),
)

SAVED = {"dtype": "float32", "range": "0..1", "mean": list(MEAN), "std": list(STD)}


def saved(
    directory: Path, features: tuple[ColumnSpec, ...] = PADDED, loss: Any = None
) -> SavedModule:
    epoch = EpochSummary(epoch=1, loss=0.5, examples=3, rounds=1, seconds=0.5, metrics=METRICS)
    module = SavedModule(
        module=Net(),
        builder=Net,
        features=features,
        head="logits",
        widths={None: 3},
        history=[epoch],
        labels=LABELS,
        loss=loss,
    )
    write_module(module, directory)
    return module


def read_changed(directory: Path, place: tuple[Any, ...], changes: Any) -> None:
    """Read what ``saved`` has written, with other values in a place of its description."""
    path = directory / "module.json"
    description = found = json.loads(path.read_text())
    for key in place:
        found = found[key]
    found |= changes
    path.write_text(json.dumps(description))
    read_module(directory, trust=["models"])


@every("features", [PADDED, SCALED])
def test_all_is_read_back_and_torch_s_losses_need_no_trust(
    tmp_path: Path, features: tuple[ColumnSpec, ...]
) -> None:
    wrote = saved(tmp_path, features, nn.CrossEntropyLoss(label_smoothing=0.25))
    found = read_module(tmp_path, trust=["models"])
    assert (found.features, found.labels) == (features, LABELS)
    assert found.history == wrote.history
    assert found.loss.label_smoothing == 0.25


def test_a_loss_of_one_s_own_needs_trust(tmp_path: Path) -> None:
    saved(tmp_path, loss=lambda outputs, targets: outputs - targets)
    with pytest.raises(ConfigError, match="loss was saved as a pickle"):
        read_module(tmp_path, trust=["models"])
    assert read_module(tmp_path, trust=True).loss(3, 1) == 2


@every(
    ("changes", "words"),
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
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: Any, words: str) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match=words):
        read_changed(tmp_path, (), changes)


@every("value", [3, [1.0], {"a": "text"}, {"a": None}, {"a": [{"b": "c"}]}])
def test_metrics_that_are_no_numbers_are_refused(tmp_path: Path, value: Any) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match="an entry of history is invalid: metrics is"):
        read_changed(tmp_path, ("history", 0), {"metrics": value})


NO_PADDING: list[dict[str, Any]] = [
    {"padding": {"value": "0", "input": None}},
    {"padding": {"value": True, "input": None}},
    {"padding": {"value": float("nan"), "input": None}},
    {"padding": {"value": 0, "input": "mask"}},
    {"padding": {"value": 0, "input": []}},
    {"padding": {"value": 0}},
    {"padding": 3},
    {"row_shape": [4]},
    {"row_shape": [4, -1]},
    {"row_shape": [-1, -1]},
    {"row_shape": []},
]
NO_SCALE: list[dict[str, Any]] = [
    {"scale": {**SAVED, "dtype": "uint8"}},
    {"scale": {**SAVED, "dtype": "Tensor"}},
    {"scale": {**SAVED, "dtype": 3}},
    {"scale": {**SAVED, "range": "0-1"}},
    {"scale": {**SAVED, "range": []}},
    {"scale": {**SAVED, "mean": [0.5]}},
    {"scale": {**SAVED, "mean": []}},
    {"scale": {**SAVED, "std": [1, 1, 0]}},
    {"scale": {**SAVED, "std": [1, 1, "1"]}},
    {"scale": {**SAVED, "std": [1, 1, float("nan")]}},
    {"scale": {**SAVED, "std": [1, 1, 10**400]}},
    {"scale": {**SAVED, "mean": 0.5}},
    {"scale": {"dtype": "float32"}},
    {"scale": {**SAVED, "more": 1}},
    {"scale": 3},
    {"row_shape": [3]},
    {"dtype": "float32"},
    {"encoding": "image fitted"},
]


@every(
    ("features", "changes"),
    [*((PADDED, each) for each in NO_PADDING), *((SCALED, each) for each in NO_SCALE)],
)
def test_columns_that_nobody_saves_are_refused(
    tmp_path: Path, features: tuple[ColumnSpec, ...], changes: dict[str, Any]
) -> None:
    saved(tmp_path, features)
    with pytest.raises(ConfigError, match="an entry of features is invalid"):
        read_changed(tmp_path, ("features", 0), changes)
