"""How a saved model takes images: it comes back, and no damaged file makes something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from every_row import every
from torch import nn

from sparkdl.checkpoint.module_files import SavedModule, read_module, write_module
from sparkdl.encodings import PIXELS
from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.scale import Scale
from sparkdl.errors import ConfigError
from sparkdl.protocols import ColumnSpec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMAL = Scale(torch.bfloat16, "0..1", MEAN, STD)
SCALED = (
    ColumnSpec("photo", torch.uint8, (3, 8, 9), FITS["pad"], scale=NORMAL),
    ColumnSpec("grey", torch.uint8, (1, 8, 9), PIXELS, scale=Scale(torch.float32, "0..255")),
    ColumnSpec("raw", torch.uint8, (4, 8, 9), FITS["stretch"]),
)


def write(directory: Path) -> Path:
    module = nn.Linear(1, 1)
    write_module(SavedModule(module, module, SCALED, "unknown", {None: 1}, []), directory)
    return directory / "module.json"


def test_size_fit_and_floats_come_back(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_module(tmp_path, trust=True).features == SCALED


SAVED = {"dtype": "float32", "range": "0..1", "mean": list(MEAN), "std": list(STD)}


@every(
    "changes",
    [
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
    ],
)
def test_floats_that_nobody_saves_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    path = write(tmp_path)
    description = json.loads(path.read_text())
    description["features"][0] |= changes
    path.write_text(json.dumps(description))
    with pytest.raises(ConfigError, match="an entry of features is invalid"):
        read_module(tmp_path, trust=True)
