"""Whenever the power is cut, there is one whole checkpoint or model: all that had been promised."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from power_loss import cuts, recorded
from pyspark import SparkContext
from torch import nn

from sparkdl.checkpoint.container import Piece
from sparkdl.checkpoint.module_files import SavedModule, load_module, write_module
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.durable.local_files import ASIDE
from sparkdl.spark.files import fetch, publish


def save(store: CheckpointStore, epoch: int) -> None:
    texts = {name: f"{name} of {epoch}".encode() for name in ("center", "rank-0")}
    contents = {name: Piece("U8", [len(text)], _blocks(text)) for name, text in texts.items()}
    store.write(contents, {"epoch": epoch})
    store.prune()


def _blocks(octets: bytes) -> Callable[[int], Iterator[bytes]]:
    return lambda size: iter([octets])


def newest(path: Path) -> int:
    """The epoch of the newest checkpoint, all of whose bytes are right; 0 if there is none."""
    saved = CheckpointStore(str(path), keep_last=1).newest()
    if saved is None:
        return 0
    for name in ("center", "rank-0"):
        found = b"".join(saved.contents[name].blocks(7))
        assert found == f"{name} of {saved.description['epoch']}".encode()
    return int(saved.description["epoch"])


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_published_checkpoint_or_a_newer_one_survives_the_power_at_every_point(
    memory: Path, keep_last: int
) -> None:
    (disk := memory / "disk").mkdir()
    with recorded(disk) as recorder:
        store = CheckpointStore(str(disk / "a" / "b"), keep_last=keep_last)
        for epoch in (1, 2, 3):
            save(store, epoch)
            recorder.note(epoch)
    assert recorder.points[-1].returned == (1, 2, 3)
    for point, left in cuts(recorder, memory):
        promised = max(point.returned, default=0)
        assert promised <= newest(left / "a" / "b") <= promised + 1
        shutil.rmtree(left)


def test_after_the_power_was_cut_the_next_checkpoints_are_as_good(memory: Path) -> None:
    (disk := memory / "disk").mkdir()
    with recorded(disk) as recorder:
        store = CheckpointStore(str(disk), keep_last=1)
        save(store, 1)
        save(store, 2)
    for _, left in cuts(recorder, memory, draws=1):
        again = CheckpointStore(str(left), keep_last=1)
        with again.held():
            save(again, 7)
        assert newest(left) == 7
        assert len(list(left.iterdir())) == 1, "the debris was not swept"
        shutil.rmtree(left)


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)


def made(directory: Path, version: int) -> Path:
    """A directory of several files, in rooms, each of which says the version."""
    (directory / "metadata").mkdir(parents=True)
    for name in ("module.json", "module.safetensors", "metadata/part-00000"):
        (directory / name).write_text(json.dumps([name, version]))
    return directory


def version_of(directory: Path) -> int:
    """Which version is there, whole; 0 for none at all."""
    with fetch(str(directory)) as found:
        if not found.exists():
            return 0
        texts = [json.loads(p.read_text()) for p in found.rglob("*") if p.is_file()]
        assert len(texts) == 3
        versions = {version for _, version in texts}
        assert len(versions) == 1
        return int(versions.pop())


@pytest.mark.usefixtures("without_spark")
def test_a_saved_model_or_the_one_that_replaces_it_survives_at_every_point(memory: Path) -> None:
    (disk := memory / "disk").mkdir()
    with recorded(disk) as recorder:
        for version in (1, 2):
            directory = made(memory / f"made-{version}", version)
            publish(directory, str(disk / "models" / "m"), overwrite=version > 1)
            recorder.note(version)
    assert os.listdir(disk / "models") == ["m"]
    for point, left in cuts(recorder, memory):
        promised = max(point.returned, default=0)
        assert promised <= version_of(left / "models" / "m") <= promised + 1
        publish(made(left / "made", 9), str(left / "models" / "m"), overwrite=True)
        assert version_of(left / "models" / "m") == 9
        shutil.rmtree(left)


@pytest.mark.usefixtures("without_spark")
def test_a_save_killed_between_its_renames_leaves_the_old_model_to_be_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(made(memory / "1", 1), str(memory / "m"), overwrite=False)
    rename, renamed = os.rename, []

    def dying(source: str, target: str, **at: int) -> None:
        if renamed:
            os._exit(9)
        renamed.extend([target] * source.startswith("m"))
        rename(source, target, **at)

    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "rename", dying)
        publish(made(memory / "2", 2), str(memory / "m"), overwrite=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert version_of(memory / "m") == 1


@pytest.mark.usefixtures("without_spark")
def test_a_module_is_found_without_spark_where_a_save_was_interrupted(memory: Path) -> None:
    """As the test before leaves it: the old one aside, the new one not yet there."""
    (there := memory / f"m{ASIDE}").mkdir()
    module = nn.Linear(2, 1)
    write_module(SavedModule(module, module, (), "raw", {None: 1}, ()), there)
    loaded = load_module(memory / "m", trust=True)
    assert torch.equal(loaded.state_dict()["weight"], module.weight)
