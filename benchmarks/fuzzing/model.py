"""The files of a saved model: its description, its weights, and which of them exist."""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fuzzing.loop import Target
from fuzzing.mutation import as_text, mutated, mutated_bytes, number_of_changes
from fuzzing.object_spec import METADATA, SPEC_ODD, Canary
from fuzzing.tensors import mutated_file
from sparkdl import TorchModel
from sparkdl.checkpoint.module_files import DESCRIPTION, WEIGHTS, SavedModule, load_module
from sparkdl.estimator.persistence import ModelWriter
from sparkdl.events import EpochSummary
from sparkdl.protocols import ColumnSpec

SUMMARY = EpochSummary(epoch=1, loss=0.5, examples=3, rounds=2, seconds=1.5, measured={"n": 1.0})


class ModelTarget(Target):
    """A directory as ``TorchModel.save`` writes it, loaded without trust."""

    name = "model"
    reads = ("checkpoint/module_files.py", "checkpoint/object_spec.py", "estimator/persistence.py")
    deadline_s = 5.0

    def __enter__(self) -> ModelTarget:
        self._canary = self.enter_context(Canary())
        self._folder = self._canary.folder / "saved"
        saved = SavedModule(
            module=nn.Linear(4, 2),
            builder=functools.partial(nn.Linear, 4, 2),
            features=(ColumnSpec("x", torch.float32, (4,)), ColumnSpec("y", torch.int64)),
            head="logits",
            widths={None: 2},
            history=(SUMMARY, SUMMARY),
        )
        ModelWriter(TorchModel._from_saved(saved), saved).save(str(self._folder))
        self._description: dict[str, Any] = json.loads((self._folder / DESCRIPTION).read_text())
        self._metadata: dict[str, Any] = json.loads((self._folder / METADATA).read_text())
        self._weights = (self._folder / WEIGHTS).read_bytes()
        return self

    def attempt(self, draw: random.Random) -> bool:
        """One directory."""
        changes, kind = number_of_changes(draw), draw.randrange(10)
        text, weights = json.dumps(self._description).encode(), self._weights
        metadata = self._metadata
        if kind == 0:
            metadata = mutated(draw, metadata, changes)
        elif kind <= 5:
            wrong = mutated(draw, self._description, changes, SPEC_ODD)
            text = as_text(wrong).encode("utf-8", "surrogatepass")
        elif kind == 6:
            text = mutated_bytes(draw, text, changes)
        else:
            weights = mutated_file(draw, weights, changes)
        for name, octets in ((DESCRIPTION, text), (WEIGHTS, weights)):
            _put(self._folder / name, octets, missing=draw.random() < 0.01, draw=draw)
        (self._folder / METADATA).write_text(as_text(metadata))
        try:
            if kind % 2:
                load_module(self._folder)
            else:
                TorchModel.load(str(self._folder))
        finally:
            self._canary.require_silence()
        return True


def _put(path: Path, octets: bytes, *, missing: bool, draw: random.Random) -> None:
    """Write a file again, or put nothing, a directory or a dangling link in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if not missing:
        path.write_bytes(octets)
    elif draw.random() < 0.3:
        path.mkdir()
    elif draw.random() < 0.3:
        path.symlink_to("nowhere")
