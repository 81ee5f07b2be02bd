"""Checkpoints are published whole; whatever else is found is skipped in words."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from every_row import every
from fsspec.implementations.local import LocalFileSystem
from hostile import damaged
from hypothesis import given, settings
from pyarrow import fs

from sparkdl.checkpoint import storage
from sparkdl.checkpoint.container import Piece
from sparkdl.checkpoint.storage import CheckpointStore, SavedCheckpoint
from sparkdl.durable.local_files import LocalFiles
from sparkdl.errors import CheckpointError, ConfigError


def save(store: CheckpointStore, epoch: int, content: bytes = b"weights") -> str:
    contents = {name: piece(content + name.encode()) for name in ("center", "rank-0")}
    return store.write(contents, {"epoch": epoch})


def piece(*blocks: bytes) -> Piece:
    return Piece("U8", [sum(map(len, blocks))], lambda _: iter(blocks))


def content(saved: SavedCheckpoint, name: str = "center") -> bytes:
    return b"".join(saved.contents[name].blocks(5))


def newest_epoch(path: Path | str) -> int | None:
    saved = CheckpointStore(str(path), keep_last=2).newest()
    return None if saved is None else int(saved.description["epoch"])


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_the_newest_wins_whatever_its_epoch_and_there_may_be_none(tmp_path: Path) -> None:
    assert newest_epoch(tmp_path) is None
    assert newest_epoch(tmp_path / "a" / "b") is None
    for epoch in (5, 6, 1):
        save(CheckpointStore(str(tmp_path), keep_last=9), epoch)
    assert newest_epoch(tmp_path) == 1


def test_an_abandoned_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    def half(size: int) -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    contents = {"rank-0": piece(b"whole"), "center": Piece("U8", [9], half)}
    with pytest.raises(KeyboardInterrupt):
        CheckpointStore(str(tmp_path), keep_last=2).write(contents, {})
    assert names(tmp_path) == []


def test_the_last_ones_are_kept_and_debris_is_swept(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=2)
    save(store, 1)
    debris = f".checkpoint-000002.safetensors.partial-{'0' * 32}"
    (tmp_path / debris).write_bytes(b"half")  # by a process that was killed then
    (tmp_path / "the user's own").mkdir()
    store = CheckpointStore(str(tmp_path), keep_last=2)
    with store.held():
        for epoch in (2, 3, 4):
            save(store, epoch)
            store.prune()
    kept = ["checkpoint-000003.safetensors", "checkpoint-000004.safetensors"]
    assert names(tmp_path) == [*kept, "the user's own"]
    assert newest_epoch(tmp_path) == 4


def test_a_name_is_never_used_twice(tmp_path: Path) -> None:
    first, second = (CheckpointStore(str(tmp_path), keep_last=2) for _ in range(2))
    between: list[str] = []

    def meanwhile(size: int) -> Iterator[bytes]:
        between.append(save(second, 1))
        yield b"late"

    path = first.write({"center": Piece("U8", [4], meanwhile)}, {"epoch": 2})
    assert {path, *between} == set(map(str, tmp_path.iterdir()))
    assert len(names(tmp_path)) == 2


@settings(max_examples=60)
@given(data=st.data())
def test_any_damage_to_the_newest_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, data: st.DataObject, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(tmp_path)
    store = CheckpointStore(str(tmp_path), keep_last=2)
    save(store, 1)
    victim = Path(save(store, 2))
    octets = bytearray(victim.read_bytes())
    deed = data.draw(st.sampled_from(["flip", "cut", "grow", "remove"]))
    if deed == "flip":
        place = data.draw(st.integers(0, len(octets) - 1))
        octets[place] ^= 1 << data.draw(st.integers(0, 7))
    elif deed == "cut":
        del octets[data.draw(st.integers(0, len(octets) - 1)) :]
    elif deed == "grow":
        octets += b"x"
    victim.write_bytes(octets)
    if deed == "remove":
        victim.unlink()
    caplog.clear()
    saved = CheckpointStore(str(tmp_path), keep_last=2).newest()
    assert saved.description == {"epoch": 1}
    assert deed == "remove" or "checkpoint-000002.safetensors is damaged" in caplog.text


def forge(path: str, change: Callable[[Any], Any]) -> None:
    """Change a header as somebody would who knows how the checksum is formed."""
    file = Path(path)
    octets = file.read_bytes()
    body = 8 + int.from_bytes(octets[:8], "little")
    header = json.dumps(change(json.loads(octets[8:body]))).encode()
    whole = len(header).to_bytes(8, "little") + header + octets[body:-32]
    file.write_bytes(whole + hashlib.sha256(whole).digest())


@pytest.mark.timeout(120)
@every("what", ["/dev/zero", "elsewhere", "pipe", "directory"])
def test_only_regular_files_are_read(tmp_path: Path, what: str) -> None:
    """Nor is anything else in the way of the next checkpoint."""
    store = CheckpointStore(str(tmp_path), keep_last=2)
    save(store, 1)
    other = Path(save(CheckpointStore(str(tmp_path / "other"), keep_last=1), 7))
    other.rename(tmp_path / "elsewhere")
    hostile = tmp_path / "checkpoint-000002.safetensors"
    match what:
        case "pipe":
            os.mkfifo(hostile)
        case "directory":
            hostile.mkdir()
        case _:
            hostile.symlink_to(tmp_path / what)
    assert newest_epoch(tmp_path) == 1
    assert Path(save(store, 3)).name == "checkpoint-000003.safetensors"
    assert newest_epoch(tmp_path) == 3


def test_a_description_nested_without_end_is_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=2)
    save(store, 1)
    deep = {"format": "2", "description": "[" * 200_000}
    forge(save(store, 2), lambda header: header | {"__metadata__": deep})
    assert newest_epoch(tmp_path) == 1
    assert "is damaged (its metadata is not readable: RecursionError" in caplog.text


def test_checkpoints_of_several_files_are_refused_in_words(tmp_path: Path) -> None:
    """As versions before the first release wrote them; those of now are used beside them."""
    (before := tmp_path / "checkpoint-000004").mkdir()
    assert newest_epoch(tmp_path) is None
    (before / "manifest.json").write_text("{}")
    message = r"checkpoint-000004 is a .* earlier version.* delete"
    with pytest.raises(CheckpointError, match=message):
        newest_epoch(tmp_path)
    save(CheckpointStore(str(tmp_path), keep_last=1), 7)
    assert newest_epoch(tmp_path) == 7


@settings(max_examples=150)
@given(data=st.data())
def test_a_header_that_says_anything_is_used_or_skipped_and_never_an_error_of_pythons(
    tmp_path: Path, data: st.DataObject
) -> None:
    shutil.rmtree(tmp_path)
    store = CheckpointStore(str(tmp_path), keep_last=2)
    save(store, 1)
    forge(save(store, 2), lambda header: data.draw(damaged(header)))
    saved, refusal = None, ""
    try:
        saved = CheckpointStore(str(tmp_path), keep_last=2).newest()
    except CheckpointError as error:
        refusal = str(error)
    if saved is None:
        assert "newer than" in refusal
        return
    for name, piece in saved.contents.items():
        assert len(content(saved, name)) == piece.size
    save(store, 3)
    store.keep_last = 1
    store.prune()
    assert names(tmp_path) == ["checkpoint-000003.safetensors"]


@every(
    "change",
    [
        lambda header: header | {"center": header["center"] | {"shape": [1] * 65}},
        lambda header: header | {"center": header["center"] | {"shape": [1 << 63, 0]}},
        lambda header: {"__metadata__": header["__metadata__"]},
    ],
)
def test_a_header_of_what_no_tensor_is_or_without_a_checksum_is_damaged(
    tmp_path: Path, change: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Many dimensions or large numbers would take hours to multiply."""
    store = CheckpointStore(str(tmp_path), keep_last=2)
    forge(save(store, 1), change)
    assert CheckpointStore(str(tmp_path), keep_last=2).newest() is None
    assert "is damaged" in caplog.text


def test_a_tensor_of_other_bytes_than_it_announces_is_not_published(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    with pytest.raises(CheckpointError, match="tensor 'short' has 4 of 8 bytes"):
        store.write({"short": Piece("U8", [8], lambda _: iter([b"abcd"]))}, {})
    assert not list(tmp_path.glob("checkpoint-*"))


@every("name", ["checkpoint-000009", "checkpoint-٠٠٠٠٠٩.safetensors", "checkpoint-9.safetensors"])
def test_a_file_named_like_a_checkpoint_is_neither_read_nor_in_the_way(
    tmp_path: Path, name: Any
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    (tmp_path / name).write_text("the user's own")
    for epoch in (1, 2, 3):
        save(store, epoch)
        store.prune()
    assert newest_epoch(tmp_path) == 3
    assert len(names(tmp_path)) == 2
    assert (tmp_path / name).read_text() == "the user's own"


def test_what_cannot_be_deleted_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    for epoch in (1, 2, 3):
        save(store, epoch)
    delete = LocalFiles.delete_file

    def refusing(files: LocalFiles, path: str) -> None:
        if "000002" in path:
            raise PermissionError(path)
        delete(files, path)

    monkeypatch.setattr(LocalFiles, "delete_file", refusing)
    store.prune()
    assert names(tmp_path) == ["checkpoint-000002.safetensors", "checkpoint-000003.safetensors"]


def test_a_checkpoint_that_is_being_written_is_not_swept(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)

    def late(size: int) -> Iterator[bytes]:
        save(store, 2)
        store.prune()
        yield b"late"

    store.write({"center": Piece("U8", [4], late)}, {"epoch": 1})
    assert names(tmp_path) == ["checkpoint-000001.safetensors", "checkpoint-000002.safetensors"]
    store.prune()
    assert newest_epoch(tmp_path) == 2
    assert names(tmp_path) == ["checkpoint-000002.safetensors"]


def test_a_newer_format_is_refused_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "FORMAT", 3)
    save(CheckpointStore(str(tmp_path), keep_last=2), 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 3, newer than the 2"):
        newest_epoch(tmp_path)


@every("path", ["file://{}/here", "{}/here", "here"])
def test_a_path_may_be_a_uri_or_plain_or_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(CheckpointStore(path.format(tmp_path), keep_last=2), 4)
    assert names(tmp_path / "here") == ["checkpoint-000001.safetensors"]
    assert newest_epoch(path.format(tmp_path)) == 4


def test_any_file_system_of_pyarrow_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in memory, which like an object store has no real directories to rename."""
    memory = fs._MockFileSystem()
    monkeypatch.setattr(storage, "_resolve", lambda path, elsewhere: (memory, path))
    store = CheckpointStore("bucket/job", keep_last=2)
    for epoch in (1, 2, 3):
        save(store, epoch)
    store.prune()
    assert newest_epoch("bucket/job") == 3
    assert len(memory.get_file_info(fs.FileSelector("bucket/job"))) == 2


@every("path", ["nosuch://x/y", "nosuch:/x/y", "/dev/null/x"])
def test_a_path_that_cannot_be_used_is_refused_in_words(path: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpointPath .* cannot be used: "):
        CheckpointStore(path, keep_last=2)


class FillsUp(LocalFileSystem):
    """A local file system whose disk is full after some bytes."""

    cachable = False

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return Filling(self, path) if "w" in mode else super().open(path, mode, **options)


class Filling(io.FileIO):
    def __init__(self, disk: FillsUp, path: str) -> None:
        super().__init__(path, "w")
        self.disk = disk

    def write(self, octets: Any) -> int:
        self.disk.room -= len(octets)
        if self.disk.room < 0:
            raise OSError(28, "No space left on device")
        return super().write(octets)


@given(room=st.integers(0, 500))
def test_a_disk_that_fills_up_at_any_byte_never_publishes_half_a_checkpoint(
    tmp_path: Path, room: int
) -> None:
    shutil.rmtree(tmp_path)
    save(CheckpointStore(str(tmp_path), keep_last=2), 1)
    files = fs.PyFileSystem(fs.FSSpecHandler(FillsUp(room)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_resolve", lambda path, elsewhere: (files, path))
        store = CheckpointStore(str(tmp_path), keep_last=2)
        error = None
        try:
            save(store, 2)
        except CheckpointError as caught:
            error = caught
    assert error is None or "No space left" in str(error)
    assert newest_epoch(tmp_path) == (2 if error is None else 1)
