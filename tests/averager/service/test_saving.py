"""What a checkpoint says of a run's progress and center is looked at before it is believed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every

from sparkdl.averager.messages.progress import Progress
from sparkdl.averager.service.saving import ResumedCheckpoint
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.checkpoint.tensor_file import write_tensors
from sparkdl.errors import CheckpointError
from sparkdl.events import EpochSummary, WindowSums
from sparkdl.protocols import Segment

SUMS = WindowSums(rank=0, examples=2, loss_sum=0.5)
SUMMARY = EpochSummary(epoch=1, loss=0.5, examples=2, rounds=1, seconds=1.0)


@every(
    "progress",
    [
        {},
        {"epoch": "x"},
        {"epoch": 1, "positions": 7},
        {"positions": [{"epoch": []}]},
        {"positions": [[]]},
        {"sums": [{}]},
        {"sums": [{**asdict(SUMS), "rank": 1}]},
        {"epoch": -1},
        {"epoch": 1 << 63},
        {"rounds": 1.5},
        {"positions": [{"epoch": None}]},
        {"positions": [{"step": 2.0}]},
        {"sums": [{**asdict(SUMS), "last": 1}]},
        {"history": [{**asdict(SUMMARY), "loss": None}]},
    ],
)
def test_a_checkpoint_that_says_nothing_of_its_progress_is_refused_in_words(
    tmp_path: Path, progress: dict[str, Any]
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    whole = Progress.start(1).as_json()
    said = progress and {**whole, **progress}
    store.begin().publish({"config": {}, "data": None, "progress": said})
    saved = store.newest()
    assert saved is not None
    with pytest.raises(CheckpointError, match="does not say how far"):
        ResumedCheckpoint.of(saved)


def test_a_center_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    pending = CheckpointStore(str(tmp_path), keep_last=1).begin()
    with pending.create("center.safetensors") as file:
        write_tensors(file, {"no number": torch.ones(3)})
    pending.publish({"config": {}, "data": None, "progress": Progress.start(1).as_json()})
    saved = CheckpointStore(str(tmp_path), keep_last=1).newest()
    assert saved is not None
    with pytest.raises(CheckpointError, match="belongs to a different model"):
        ResumedCheckpoint.of(saved).read_center((Segment("parameters", torch.float32, 3),))


@every(("name", "epoch"), [("0", "two"), ("0", "9" * 5000), ("0", "-1"), ("1", "2"), ("0", "")])
def test_a_kept_model_of_another_training_is_refused_in_words(
    tmp_path: Path, name: str, epoch: str
) -> None:
    pending = CheckpointStore(str(tmp_path), keep_last=1).begin()
    with pending.create("kept-model.safetensors") as file:
        write_tensors(file, {name: torch.ones(3)}, {"epoch": epoch})
    pending.publish({"config": {}, "data": None, "progress": Progress.start(1).as_json()})
    saved = CheckpointStore(str(tmp_path), keep_last=1).newest()
    assert saved is not None
    with pytest.raises(CheckpointError, match="belongs to a different model"):
        ResumedCheckpoint.of(saved).read_kept_model((Segment("parameters", torch.float32, 3),))
