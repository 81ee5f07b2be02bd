"""Checkpoints: what the manifest describes, the tensors beside it, and users' own state."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import random
import shutil
import zipfile
from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from fuzzer import Fault, Target
from mutation import ODD, as_text, mutated, mutated_bytes, mutated_file, number_of_changes
from torch import nn

from sparkdl.averager.messages.progress import Position, Progress
from sparkdl.averager.service.saving import CENTER, ResumedCheckpoint, worker_state_file
from sparkdl.checkpoint.policy import require_same
from sparkdl.checkpoint.state_files import STATE_FILE, load_state, save_state
from sparkdl.checkpoint.storage import CheckpointStore, SavedCheckpoint
from sparkdl.checkpoint.tensor_file import write_tensors
from sparkdl.driver import build_replica, initial_center
from sparkdl.driver.resuming import identity, require_progress, require_same_rows
from sparkdl.durable.manifest import MANIFEST
from sparkdl.events import EpochSummary, WindowSums
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.worker import Job

MANIFEST_ODD = [
    *ODD,
    *("/dev/zero", "/dev/stdin", "../secret", "..", CENTER, f"x/../{CENTER}", "nowhere/at/all"),
    *(
        {"bytes": 0, "sha256": hashlib.sha256().hexdigest()},
        {"sha256": "0" * 64},
        {"bytes": 1 << 62},
    ),
]
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


class _Stored(Target):
    """A directory with one checkpoint, rewritten for every input."""

    deadline_s = 5.0

    def __enter__(self) -> _Stored:
        self._folder = self.folder()
        self._path = self._folder / "checkpoints"
        (self._folder / "secret").write_text("nobody's business")
        self._write(CheckpointStore(str(self._path), keep_last=2))
        (self._directory,) = self._path.iterdir()
        self._files = {file.name: file.read_bytes() for file in self._directory.iterdir()}
        return self

    @abstractmethod
    def _write(self, store: CheckpointStore) -> None:
        """Save a good one."""

    def _put(self, files: dict[str, bytes]) -> None:
        shutil.rmtree(self._path)
        self._directory.mkdir(parents=True)
        for name, octets in files.items():
            (self._directory / name).write_bytes(octets)

    def _manifest_with(self, name: str, octets: bytes) -> dict[str, Any]:
        """The manifest with what is right for these bytes of a file."""
        manifest: dict[str, Any] = json.loads(self._files[MANIFEST])["manifest"]
        sha256 = hashlib.sha256(octets).hexdigest()
        manifest["files"][name] = {"bytes": len(octets), "sha256": sha256}
        return manifest


def _sealed(manifest: Any) -> bytes:
    """A manifest with its correct checksum."""
    text = as_text(manifest)
    try:
        plain = json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        plain = text
    digest = hashlib.sha256(plain.encode()).hexdigest()
    return f'{{"sha256": "{digest}", "manifest": {text}}}'.encode()


class CheckpointTarget(_Stored):
    """A checkpoint whose checksums are right but whose contents are wrong."""

    name = "checkpoint"

    def _write(self, store: CheckpointStore) -> None:
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
        replica = build_replica(job.model, job.optimizer, job.loss, job.seed)
        self._layout, center = initial_center(replica, with_optimizer=False)
        self._config = identity(job, WORKERS, replica, self._layout)
        names = [f"{at}.{segment.kind}" for at, segment in enumerate(self._layout)]
        tensors = dict(zip(names, center, strict=True))
        description = {"data": FACTS.lasting(), "progress": PROGRESS.as_json()}
        store.write(
            {
                CENTER: partial(write_tensors, tensors=tensors),
                worker_state_file(0): lambda file: file.write(bytes(12)),
            },
            {"config": self._config, **description},
        )

    def attempt(self, draw: random.Random) -> bool:
        """One checkpoint."""
        changes, center = number_of_changes(draw), self._files[CENTER]
        of_the_center = draw.random() < 0.3
        if of_the_center:
            center = mutated_file(draw, center, changes)
        manifest = self._manifest_with(CENTER, center)
        if not of_the_center:
            manifest["description"] = mutated(draw, manifest["description"], changes)
        self._put({**self._files, CENTER: center, MANIFEST: _sealed(manifest)})
        saved = CheckpointStore(str(self._path), keep_last=2).newest()
        if saved is None:
            return False
        self._resume(saved)
        return True

    def _resume(self, saved: SavedCheckpoint) -> None:
        """Do everything that a training does to go on from there."""
        resumed = ResumedCheckpoint.of(saved)
        require_same(saved.directory, saved.description["config"], self._config)
        require_progress(resumed, EPOCHS, WORKERS)
        resumed.read_center(self._layout)
        require_same_rows(resumed, FACTS.lasting(), COLUMNS)
        if resumed.worker_state_bytes(0):
            list(resumed.worker_state(0, 5))
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


class StateTarget(_Stored):
    """What ``save_checkpoint`` wrote for a user's own loop: a torch file."""

    name = "state"

    def _write(self, store: CheckpointStore) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = {"model": model, "optimizer": optimizer, "epoch": 3, "names": ["a", None]}
        save_state(store, state)

    def attempt(self, draw: random.Random) -> bool:
        """One state."""
        octets = _mutated_archive(draw, self._files[STATE_FILE], number_of_changes(draw))
        manifest = self._manifest_with(STATE_FILE, octets)
        if draw.random() < 0.1:
            manifest = mutated(draw, manifest, 1, MANIFEST_ODD)
        self._put({STATE_FILE: octets, MANIFEST: _sealed(manifest)})
        return load_state(str(self._path)) is not None


def _mutated_archive(draw: random.Random, octets: bytes, changes: int) -> bytes:
    """A zip archive with a member's bytes changed and checksums right, or its own bytes changed."""
    if draw.random() < 0.3:
        return mutated_bytes(draw, octets, changes)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(octets)) as before, zipfile.ZipFile(made, "w") as after:
        wrong = draw.choice([n for n in before.namelist() if "data" in n or draw.random() < 0.2])
        for name in before.namelist():
            member = before.read(name)
            if name == wrong:
                member = mutated_bytes(draw, member, changes)
            after.writestr(name, member)
    return made.getvalue()


def _holds_numbers(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_holds_numbers, value.values()))
    return all(map(_holds_numbers, value)) if isinstance(value, list) else type(value) in _NUMBERS
