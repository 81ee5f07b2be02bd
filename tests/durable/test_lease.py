"""One process at a time writes checkpoints to a directory; another is told whose it is."""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from forked import FORKED
from pyarrow import fs
from waiting import eventually

from sparkdl.checkpoint import storage
from sparkdl.checkpoint.container import Piece
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.durable import lease
from sparkdl.errors import CheckpointError, ConfigError, StoppedError


def save(store: CheckpointStore, epoch: int) -> None:
    store.write({"center": Piece("U8", [7], lambda _: iter([b"weights"]))}, {"epoch": epoch})
    store.prune()


def store_at(path: Path | str) -> CheckpointStore:
    return CheckpointStore(str(path), keep_last=1)


@pytest.fixture(autouse=True)
def without_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse at once."""
    monkeypatch.setattr(lease, "GRACE_S", 0.05)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed often, and expire as slowly as a busy machine needs."""
    monkeypatch.setattr(lease, "RENEWED_EVERY_S", 0.2)
    monkeypatch.setattr(lease, "EXPIRES_S", 10.0)


@pytest.fixture
def expiring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases expire at once, for tests in which nobody is there to renew them."""
    monkeypatch.setattr(lease, "EXPIRES_S", 0.3)


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has none."""

    def refusing(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lease.fcntl, "flock", refusing)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> fs.FileSystem:
    """A file system that is not this machine's, as an object store is not."""
    files = fs._MockFileSystem()
    monkeypatch.setattr(storage, "_resolve", lambda path, elsewhere: (files, path))
    return files


def hold(path: str, said: Connection) -> None:
    with store_at(path).held("app-7"):
        said.send(os.getpid())
        time.sleep(600)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[multiprocessing.Process]:
    """Another process that writes checkpoints there."""
    here, there = FORKED.Pipe()
    process = FORKED.Process(target=hold, args=(str(tmp_path), there))
    process.start()
    assert here.poll(60)
    yield process  # type: ignore[misc]
    process.kill()
    process.join(60)


def test_a_second_process_is_refused_and_told_who_the_first_is(
    tmp_path: Path, other: multiprocessing.Process
) -> None:
    words = rf"in use by process {other.pid} \(app-7\) on .+ since 20\d\d-.* UTC"
    with pytest.raises(ConfigError, match=words), store_at(tmp_path).held():
        pass


def test_a_process_that_was_killed_is_no_hindrance(
    tmp_path: Path, other: multiprocessing.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRES_S", 600.0)
    os.kill(other.pid or 0, signal.SIGKILL)
    other.join(60)
    assert (tmp_path / lease.LEASE).exists()
    started = time.monotonic()
    with (store := store_at(tmp_path)).held():
        save(store, 1)
    assert time.monotonic() - started < lease.EXPIRES_S / 4


def test_a_process_that_is_stopped_on_this_machine_stays_the_holder(
    tmp_path: Path, other: multiprocessing.Process, expiring: None
) -> None:
    os.kill(other.pid or 0, signal.SIGSTOP)
    time.sleep(1.5 * lease.EXPIRES_S)
    with pytest.raises(ConfigError, match="in use"), store_at(tmp_path).held():
        pass


def test_a_process_that_is_about_to_end_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "GRACE_S", 30.0)
    with ExitStack() as first:
        first.enter_context(store_at(tmp_path).held())
        threading.Timer(0.3, first.pop_all().close).start()
        with store_at(tmp_path).held():
            pass


def test_a_lock_that_cannot_even_be_opened_now_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file server has leased it to another client."""
    monkeypatch.setattr(lease, "GRACE_S", 30.0)
    leased = os.open(tmp_path / lease.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks for the lease back
    try:
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        threading.Timer(0.3, os.close, [leased]).start()
        with store_at(tmp_path).held():
            pass
    finally:
        signal.signal(signal.SIGIO, before)


def test_a_second_training_of_this_process_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=f"process {os.getpid()} ")
    with store_at(tmp_path).held(), refused, store_at(tmp_path).held():
        pass
    with store_at(tmp_path).held():
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick", "without_locks")
def test_without_locks_a_holder_that_lives_is_told_from_one_that_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_at(tmp_path).held("alive"):
        with pytest.raises(ConfigError, match="alive"), store_at(tmp_path).held():
            pass
        dead = (tmp_path / lease.LEASE).read_bytes()
    (tmp_path / lease.LEASE).write_bytes(dead)
    monkeypatch.setattr(lease, "EXPIRES_S", 0.3)
    with store_at(tmp_path).held():
        assert "which is gone" in caplog.text


@pytest.mark.usefixtures("quick", "memory")
def test_on_a_store_that_is_not_this_machines_the_same_holds() -> None:
    refused = pytest.raises(ConfigError, match="alive")
    with store_at("bucket/job").held("alive"), refused, store_at("bucket/job").held():
        pass
    with (store := store_at("bucket/job")).held():
        save(store, 1)


@pytest.mark.usefixtures("quick")
def test_a_machine_that_shares_no_locks_is_seen_by_its_renewals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as elsewhere:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lease, "_lock", lambda files, root, locks: True)
            patch.setattr(lease, "_BOOT_ID", tmp_path / "none")
            elsewhere.enter_context(store_at(tmp_path).held("elsewhere"))
        with pytest.raises(ConfigError, match="elsewhere"), store_at(tmp_path).held():
            pass


@pytest.mark.usefixtures("expiring", "without_locks")
def test_whose_lease_was_taken_over_writes_and_deletes_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease.Lease, "keep", lambda self: None)  # as of a process that is stopped
    first, second = store_at(tmp_path), store_at(tmp_path)
    with first.held("first"), ExitStack() as stack:

        def taken_over(_: object) -> Iterator[bytes]:
            stack.enter_context(second.held("second"))
            second.write({}, {"epoch": 7})
            yield b"weights"

        with pytest.raises(CheckpointError, match=r"did not renew .* in use by .*second"):
            first.write({"center": Piece("U8", [7], taken_over)}, {"epoch": 1})
        with pytest.raises(CheckpointError, match="second"):
            first.write({}, {"epoch": 1})
        first.keep_last = 0
        first.prune()
        assert "were not deleted" in caplog.text
    saved = second.newest()
    assert saved.description == {"epoch": 7}


def test_a_checkpoint_that_was_begun_in_a_training_is_not_published_after_its_end(
    tmp_path: Path,
) -> None:
    store = store_at(tmp_path)
    with ExitStack() as training:
        training.enter_context(store.held())
        late = Piece("U8", [0], lambda _: training.close() or iter([]))
        with pytest.raises(CheckpointError, match="has ended"):
            store.write({"center": late}, {"epoch": 1})
    assert store.newest() is None


@pytest.mark.nightly_variants(daily=2)
@pytest.mark.parametrize(
    "octets", [b'{"id": {}}', b"[" * 100_000, b"", b"{", b"[]", b"x" * (lease.MAX_BYTES + 1)]
)
@pytest.mark.usefixtures("expiring")
def test_a_lease_that_says_anything_at_all_blocks_nobody_for_ever(
    tmp_path: Path, octets: bytes
) -> None:
    (tmp_path / lease.LEASE).write_bytes(octets)
    with (store := store_at(tmp_path)).held():
        save(store, 1)


@pytest.mark.usefixtures("quick")
def test_numbers_go_on_behind_those_of_who_has_gone_meanwhile(tmp_path: Path) -> None:
    late = store_at(tmp_path)
    with (early := store_at(tmp_path)).held():
        save(early, 1)
        save(early, 2)
    with late.held():
        save(late, 3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-000003.safetensors"]


@pytest.mark.usefixtures("quick")
def test_a_lease_on_files_that_end_with_the_run_leaves_the_runs_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker's of `sparkdl.run`, whose driver opens its files and has told it to leave."""

    def ended(self: lease.Lease) -> None:
        raise StoppedError("the run ended")

    def fails() -> None:
        with store_at(tmp_path).held():
            monkeypatch.setattr(lease.Lease, "read", ended)
            keeper = next(t for t in threading.enumerate() if t.name == "sparkdl-lease")
            keeper.join(60)
            assert not keeper.is_alive()
            raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        fails()


def test_a_directory_that_cannot_be_written_to_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / lease.LEASE).mkdir()
    refused = pytest.raises(ConfigError, match=r"cannot be used: .*directory")
    with refused, store_at(tmp_path).held():
        pass


def test_a_lease_is_renewed_and_says_when_it_began(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), store_at(tmp_path).held("app-1"):
        before = json.loads((tmp_path / lease.LEASE).read_text())
        renewals = int(before.pop("renewals"))

        def renewed() -> bool:
            with suppress(ValueError):  # it is just being written
                after.update(json.loads((tmp_path / lease.LEASE).read_text()))
            return int(after.get("renewals", 0)) > renewals

        after: dict[str, Any] = {}
        assert eventually(renewed)
    del after["renewals"]
    assert after == before
    assert caplog.text == ""
