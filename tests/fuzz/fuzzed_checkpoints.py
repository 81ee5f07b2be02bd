"""Checkpoints: what they describe."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from functools import partial
from typing import Any

import torch
from calling import as_text, mutated, number_of_changes
from fuzzer import Fault, Target
from torch import nn

from sparkdl.averager.messages.run_events import Position, Progress
from sparkdl.averager.service.saving import CENTER, ResumedCheckpoint, worker_state_name
from sparkdl.checkpoint.policy import require_same
from sparkdl.checkpoint.storage import CheckpointStore, SavedCheckpoint
from sparkdl.checkpoint.tensor_file import pieces_of
from sparkdl.driver import initial_center
from sparkdl.driver.resuming import identity, require_progress, require_same_rows
from sparkdl.events import EpochSummary, WindowSums
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.worker import Job

SUMS = WindowSums(
    rank=0,
    examples=2,
    longest=2,
    loss_sum=0.5,
    divisor=2,
    weight=2,
    contributions=1,
    measured={"noise": 2.5},
)
SUMMARY = EpochSummary(
    epoch=1,
    loss=0.5,
    examples=3,
    rounds=2,
    seconds=1.5,
    metrics={"f1": [0.5, {"a": 1.0}]},
    measured={"noise": 2.5},
)
PROGRESS = Progress(
    epoch=2,
    rounds=1,
    positions=(Position(epoch=2, step=5, step_of_epoch=1), Position(epoch=2, step=4)),
    sums=(SUMS,),
    history=(SUMMARY,),
)
_NUMBERS = (int, float, bool)
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
    "Mapping[str, MetricValue]": (dict,),
    "Mapping[str, float]": (dict,),
}
"""The types that a field may have, by the words of its annotation."""
WORKERS, EPOCHS = 2, 5
COLUMNS = (ColumnSpec("x", torch.float32), ColumnSpec("y", torch.float32))
FACTS = DataStatistics(
    (3, 4), (ColumnStatistics(smallest=0.5, largest=2.0),) * 2, fingerprint=1 << 60
)


class CheckpointTarget(Target):
    """A checkpoint whose checksum is right, and whose description is wrong.

    Of the other bytes, tests with ``@given`` say so.
    """

    name = "checkpoint"
    deadline_s = 5.0

    def __enter__(self) -> CheckpointTarget:
        self._path = self.folder() / "checkpoints"
        self._write(CheckpointStore(str(self._path), keep_last=2))
        (self._file,) = self._path.iterdir()
        self._octets = self._file.read_bytes()
        return self

    def _write(self, store: CheckpointStore) -> None:
        """Save a good one."""
        job = Job(
            model=partial(nn.Linear, 1, 1),
            loss=nn.MSELoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            strategy=ParameterAveraging(2),
            schema=FeedSchema(COLUMNS[:1], COLUMNS[1]),
            epochs=EPOCHS,
            batch_size=4,
            seed=1,
            deadline_s=1.0,
        )
        replica = job.replica()
        self._layout, center = initial_center(replica, with_optimizer=False)
        self._config = identity(job, WORKERS, replica, self._layout)
        names = [f"{at}.{segment.kind}" for at, segment in enumerate(self._layout)]
        tensors = {f"{CENTER}{name}": each for name, each in zip(names, center, strict=True)}
        tensors[worker_state_name(0)] = torch.zeros(12, dtype=torch.uint8)
        description = {"data": FACTS.lasting(), "progress": PROGRESS.as_json()}
        store.write(pieces_of(tensors), {"config": self._config, **description})

    def attempt(self, draw: random.Random) -> bool:
        """One checkpoint."""
        octets = self._octets[:-32]
        body = 8 + int.from_bytes(octets[:8], "little")
        header = json.loads(octets[8:body])
        said = header["__metadata__"]
        described = mutated(draw, json.loads(said["description"]), number_of_changes(draw))
        said["description"] = as_text(described)
        text = json.dumps(header).encode()
        octets = len(text).to_bytes(8, "little") + text + octets[body:]
        self._file.write_bytes(octets + hashlib.sha256(octets).digest())
        saved = CheckpointStore(str(self._path), keep_last=2).newest()
        if saved is None:
            return False
        self._resume(saved)
        return True

    def _resume(self, saved: SavedCheckpoint) -> None:
        """Do everything that a training does to go on from there."""
        resumed = ResumedCheckpoint.of(saved)
        require_same(saved.path, saved.description["config"], self._config)
        require_progress(resumed, EPOCHS, WORKERS)
        resumed.read_center(self._layout)
        require_same_rows(resumed, FACTS.lasting(), COLUMNS)
        if (state := resumed.worker_state(0)) is not None:
            list(state.blocks(5))
        told = resumed.progress
        parts: list[Any] = [*told.positions, *told.sums, *told.history]
        for each in parts:
            for field in dataclasses.fields(each):
                value = getattr(each, field.name)
                if not isinstance(value, _KINDS[str(field.type)]):
                    raise Fault(f"{field.name} of a {type(each).__name__} is {type(value)}")
        named = [each.metrics for each in told.history]
        named += [each.measured for each in parts[len(told.positions) :]]
        if not all(map(_holds_numbers, named)):
            raise Fault("what was measured has come to something else than numbers")


def _holds_numbers(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_holds_numbers, value.values()))
    return all(map(_holds_numbers, value)) if isinstance(value, list) else type(value) in _NUMBERS
