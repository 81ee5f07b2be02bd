"""Whoever may write to a directory of ours gains no other file of ours by it, and stops nobody."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from every_row import every

from sparkdl.checkpoint.container import Piece
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.durable import lease
from sparkdl.durable.local_files import LocalFiles, put_directory
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.jobs.output import Location, Output, Run
from sparkdl.jobs.result import clear_result, write_result

pytestmark = pytest.mark.timeout(300)


def a_socket(path: Path) -> None:
    parent = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as server:
        # The whole path may be longer than the address of a socket may be.
        server.bind(f"/proc/self/fd/{parent}/{path.name}")
    os.close(parent)


ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    "link to a file": lambda path, home: path.symlink_to(home / "precious"),
    "link to nothing": lambda path, home: path.symlink_to(home / "new"),
    "link to a directory": lambda path, home: path.symlink_to(home),
    "link to itself": lambda path, home: path.symlink_to(path.name),
    "link to a device": lambda path, home: path.symlink_to("/dev/zero"),
    "hard link": lambda path, home: path.hardlink_to(home / "precious"),
    "pipe": lambda path, home: os.mkfifo(path),
    "socket": lambda path, home: a_socket(path),
    "directory": lambda path, home: path.mkdir(),
    "full directory": lambda path, home: shutil.copytree(home, path, symlinks=True) and None,
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory that nobody but its owner may change, and in the end nobody has."""
    (home := tmp_path / "home").mkdir()
    for name in ("precious", "manifest.json", "in-use.json", "run.json", "_result.json"):
        (home / name).write_text("mine")
    (home / "below").mkdir()
    (home / "below" / "precious").write_text("mine")
    before = contents(home)
    yield home
    assert contents(home) == before


def contents(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_text() for path in files}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "GRACE_S", 0.05)
    monkeypatch.setattr(lease, "EXPIRES_S", 0.3)


def write(store: CheckpointStore, epoch: int) -> None:
    store.write({"center": Piece("U8", [7], lambda _: iter([b"weights"]))}, {"epoch": epoch})


def newest(path: Path) -> int | None:
    saved = CheckpointStore(str(path), keep_last=1).newest()
    return None if saved is None else int(saved.description["epoch"])


@every("attack", ATTACKS)
def test_whatever_is_in_the_place_of_a_file_of_ours_no_file_elsewhere_changes(
    tmp_path: Path, home: Path, attack: str
) -> None:
    """A checkpoint is written, or it is refused in words."""
    for number, name in enumerate([lease.LEASE, lease.LOCK, name_of(1)]):
        (root := tmp_path / f"{number}").mkdir()
        ATTACKS[attack](root / name, home)
        store = CheckpointStore(str(root), keep_last=1)
        try:
            with store.held():
                for epoch in (1, 2):
                    write(store, epoch)
                store.prune()
        except ConfigError:  # any kind of file is no hindrance
            assert name == lease.LEASE
            assert attack in ("directory", "full directory")
        else:
            assert newest(root) == 2


def name_of(number: int) -> str:
    return f"checkpoint-{number:06d}.safetensors"


@every(
    ("attack", "ends", "words"),
    [
        (attack, *end)
        for attack in ATTACKS
        for end in (("published", "moved or replaced"), ("given up", "given up"))
    ],
)
def test_a_checkpoint_is_written_where_it_was_begun_whatever_takes_its_place(
    tmp_path: Path, home: Path, attack: str, ends: str, words: str
) -> None:
    blocks = partial(written, partial(replaced, tmp_path, ATTACKS[attack], home), ends)
    store = CheckpointStore(str(tmp_path), keep_last=1)
    with store.held():
        write(store, 1)
        with pytest.raises(CheckpointError, match=words):
            store.write({"center": Piece("U8", [7 + (1 << 20)], blocks)}, {"epoch": 2})
    assert (tmp_path / "away").read_bytes().count(b"weights") == 1
    assert newest(tmp_path) == 1


def replaced(root: Path, attack: Callable[[Path, Path], None], home: Path) -> None:
    """Put something else in the place of the second checkpoint."""
    (partial_file,) = root.glob(f".{name_of(2)}.partial-*")
    partial_file.rename(root / "away")
    attack(partial_file, home)


def written(meanwhile: Callable[[], None], ends: str, size: int) -> Iterator[bytes]:
    yield b"weights" + bytes(1 << 20)  # more than is buffered
    meanwhile()
    if ends == "given up":
        raise CheckpointError("given up")


@every("attack", ATTACKS)
def test_what_is_in_the_place_of_an_old_checkpoint_is_not_deleted_through(
    tmp_path: Path, home: Path, attack: str
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    for epoch in (1, 2):
        write(store, epoch)
    (tmp_path / name_of(1)).unlink()
    ATTACKS[attack](tmp_path / name_of(1), home)
    store.prune()
    assert newest(tmp_path) == 2
    if attack == "full directory":  # no checkpoint holds such files
        assert contents(tmp_path / name_of(1)) == contents(home)


@every("attack", ATTACKS)
def test_a_job_is_refused_or_leaves_its_output_and_no_file_elsewhere_changes(
    tmp_path: Path, home: Path, attack: str
) -> None:
    names = ["out", "out.sparkdl-job", "out.sparkdl-replaced", "out.sparkdl-staged-0"]
    for number, name in enumerate([*names, f"out.sparkdl-job/{lease.LEASE}"]):
        place = tmp_path / f"{number}" / name
        place.parent.mkdir(parents=True)
        ATTACKS[attack](place, home)
        location = Location(files=LocalFiles(), path=f"{tmp_path}/{number}/out", renames=True)
        output = Output(location, Run(job="train", run_id="a", configuration_sha256="c"))
        try:
            with output.claimed() as done:
                assert done is None
                Path(output.staged).mkdir()
                output.commit({})
        except (CheckpointError, ConfigError):
            continue
        assert json.loads((tmp_path / f"{number}" / "out" / "_result.json").read_text())


@every("attack", ATTACKS)
def test_a_result_file_and_a_saved_model_take_a_name_and_not_what_has_it(
    tmp_path: Path, home: Path, attack: str
) -> None:
    result = tmp_path / "result.json"
    ATTACKS[attack](result, home)
    with suppress(CheckpointError):
        clear_result(str(result))
        write_result(str(result), {"a": 1})
    with suppress(CheckpointError):
        clear_result(str(result))
    ATTACKS[attack](tmp_path / "model.sparkdl-replaced", home)
    (made := tmp_path / "made").mkdir()
    (made / "weights").write_text("new")
    for _ in range(2):
        put_directory(made, tmp_path / "model")
        assert contents(tmp_path / "model") == {"weights": "new"}


def test_a_device_stays_where_it_is() -> None:
    for write_it in (clear_result, lambda path: write_result(path, {})):
        with pytest.raises(CheckpointError, match="no file"):
            write_it("/dev/null")


def test_whoever_may_only_read_a_directory_keeps_nobody_out(tmp_path: Path) -> None:
    """A shared lock on all that a reader can open."""
    held = [os.open(tmp_path, os.O_RDONLY)]
    fcntl.flock(held[0], fcntl.LOCK_SH)
    with CheckpointStore(str(tmp_path), keep_last=1).held():
        private = (tmp_path / lease.LOCK).stat()
        assert private.st_mode & 0o777 == 0o600
    os.close(held[0])
    assert list(tmp_path.iterdir()) == []


@every("mode", [0o644, 0o660, 0o606])
def test_a_lock_that_others_could_take_too_is_none(tmp_path: Path, mode: int) -> None:
    (file := tmp_path / lease.LOCK).touch()
    file.chmod(mode)
    descriptor = os.open(file, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with CheckpointStore(str(tmp_path), keep_last=1).held():
        pass
    os.close(descriptor)


@every(("make", "digits"), itertools.product([Path.mkdir, Path.touch], ["9" * 18, "9" * 200]))
def test_a_number_that_leaves_no_room_does_not_hide_the_others(
    tmp_path: Path, make: Any, digits: str
) -> None:
    make(tmp_path / (name := f"checkpoint-{digits}.safetensors"))
    for epoch in (1, 2):
        with (store := CheckpointStore(str(tmp_path), keep_last=1)).held():
            assert newest(tmp_path) == (None if epoch == 1 else 1)
            write(store, epoch)
            store.prune()
    assert newest(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == [name_of(2), name]


def test_the_last_number_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / name_of(10**12 - 1)).mkdir()
    store = CheckpointStore(str(tmp_path), keep_last=1)
    with pytest.raises(CheckpointError, match=r"no numbers from 1000000000000 on. Delete"):
        write(store, 1)


def test_entries_that_are_no_files_are_no_checkpoints(tmp_path: Path) -> None:
    for number in (1, 3):
        (tmp_path / name_of(number)).mkdir()
    store = CheckpointStore(str(tmp_path), keep_last=1)
    for epoch in (1, 2):
        write(store, epoch)
        store.prune()
    assert newest(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == [name_of(1), name_of(3), name_of(5)]


@every("name", [f"{name_of(9)}\n", "new\nline", os.fsdecode(b"\xff\xfe")])
def test_a_name_of_any_bytes_is_nobodys(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with (store := CheckpointStore(str(tmp_path), keep_last=1)).held():
        write(store, 1)
        store.prune()
    assert newest(tmp_path) == 1
    assert (tmp_path / name).is_dir()


def test_a_checkpoint_path_may_be_a_link_of_the_users_own(tmp_path: Path) -> None:
    (real := tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(real)
    with (store := CheckpointStore(f"{tmp_path}/link/checkpoints", keep_last=1)).held():
        write(store, 1)
    assert newest(real / "checkpoints") == 1
