"""How a saved model's rows are padded: it comes back, and no damaged file makes something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from sparkdl.checkpoint.module_files import SavedModule, read_module, write_module
from sparkdl.errors import ConfigError
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding

FEATURES = (
    ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0, "attention_mask")),
    ColumnSpec("events", torch.float32, (UNKNOWN, 3), padding=Padding(-0.5)),
    ColumnSpec("age", torch.float32),
)


def write(directory: Path) -> Path:
    module = nn.Linear(1, 1)
    write_module(SavedModule(module, module, FEATURES, "unknown", {None: 1}, []), directory)
    return directory / "module.json"


def test_padding_comes_back(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_module(tmp_path, trust=True).features == FEATURES


def test_padding_that_nobody_saves_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for number, changes in enumerate(
        [
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
    ):
        with subtests.test(changes=changes):
            directory = tmp_path / str(number)
            directory.mkdir()
            path = write(directory)
            description = json.loads(path.read_text())
            description["features"][0] |= changes
            path.write_text(json.dumps(description))
            with pytest.raises(ConfigError, match="an entry of features is invalid"):
                read_module(directory, trust=True)
