"""Only one training at a time writes checkpoints to a directory; a second learns whose it is.

Two would number and delete each other's. The writer holds a lease: a file that names it and is
renewed while the process lives. What counts about an existing lease is whether it changes, so no
two clocks are compared: one that is not renewed for a while is taken over, and its former holder
stops writing. Where the file system has locks, a lock beside it says at once whether a process of
this user on this machine is still alive. It is on a file that nobody else can open: whoever may
only read the directory cannot keep others out of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import posixpath
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from pyarrow import fs

from sparkdl.durable.local_files import STORAGE_ERRORS, Files, LocalFiles
from sparkdl.errors import CheckpointError, InUseError, StoppedError
from sparkdl.redaction import without_credentials

logger = logging.getLogger(__name__)

LEASE = "in-use.json"
LOCK = "in-use.lock"
RENEWED_EVERY_S = 5.0
EXPIRES_S = 20.0
"""A process that is stopped for this long may lose its lease."""
GRACE_S = 5.0
"""How long a process that was told to end may still hold its lock."""
RETRY_S = 0.25
"""Seconds between two attempts to take it."""
MAX_BYTES = 1 << 16

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Holder = dict[str, str]
"""The contents of a lease."""


class Lease:
    """The right to write checkpoints to a directory; see ``held``.

    Args:
        files: the directory's file system.
        root: the directory.
        holder: what it says about its holder.

    Attributes:
        path: where the lease is.
        holder: as given.
    """

    def __init__(self, files: Files, root: str, holder: Holder) -> None:
        self._files = files
        self.path = posixpath.join(root, LEASE)
        self.holder = holder
        self._lock = threading.Lock()  # so that no half-written lease is read
        self._ended = threading.Event()

    def check(self) -> None:
        """Raise if somebody else is writing there now.

        Raises:
            CheckpointError: the lease has ended, or was taken over.
        """
        if self._ended.is_set():
            raise CheckpointError("the training it belongs to has ended")
        with self._lock:
            holder = self.read()
        if holder and holder["id"] not in ("", self.holder["id"]):
            raise CheckpointError(
                f"this process did not renew its lease for {EXPIRES_S:g} s, and the directory is "
                f"now in use by {_describe(holder)}"
            )

    def read(self) -> Holder | None:
        """What it says about its holder, empty strings if unreadable; None if there is no lease."""
        if self._files.get_file_info(self.path).type != fs.FileType.File:
            return None
        try:
            with self._files.open_input_stream(self.path) as stream:
                fields = json.loads(stream.read(MAX_BYTES))
            return {name: str(fields[name])[:200] for name in self.holder}
        except FileNotFoundError:
            return None  # it was given back meanwhile
        except (ValueError, RecursionError, TypeError, KeyError):
            return dict.fromkeys(self.holder, "")  # it is only half written

    def write(self) -> None:
        """Write who holds it, thereby renewing it."""
        with self._lock:
            if self._ended.is_set():
                return
            self.holder["renewals"] = str(int(self.holder["renewals"]) + 1)
            with self._files.open_output_stream(self.path) as stream:
                stream.write(json.dumps(self.holder).encode())

    def keep(self) -> None:
        """Renew it until it ends; runs in a thread."""
        while not self._ended.wait(RENEWED_EVERY_S):
            try:
                self.check()
                self.write()
            except CheckpointError as error:
                if not self._ended.is_set():
                    logger.error("no more checkpoints in %s: %s", self.path, error)
                return
            except StoppedError:
                return  # the run has ended, and with it the way to the files
            except STORAGE_ERRORS as error:
                logger.warning("%s could not be renewed: %s", self.path, error)

    def end(self) -> None:
        """Give the lease back."""
        self._ended.set()
        try:
            with self._lock:
                holder = self.read()
                if holder and holder["id"] == self.holder["id"]:
                    self._files.delete_file(self.path)
        except (StoppedError, *STORAGE_ERRORS) as error:
            logger.warning("%s could not be deleted: %s", self.path, error)


@contextlib.contextmanager
def held(files: Files, root: str, application: str | None = None) -> Iterator[Lease]:
    """Hold a directory's lease inside a ``with`` block.

    On local file systems, a live process of this machine is known at once, and given ``GRACE_S`` to
    end; a killed one is no obstacle. Elsewhere, and for other machines' processes, it takes up to
    ``EXPIRES_S`` to tell a killed process from a live one. Two that start at the same instant on a
    store without locks may both proceed until one of them checks again: every ``RENEWED_EVERY_S``,
    and before it begins, publishes or deletes a checkpoint.

    Args:
        files: the directory's file system.
        root: the directory, which has to exist.
        application: what the process belongs to, shown to whoever is refused.

    Raises:
        InUseError: somebody else holds it; the message says who.
        OSError: the file system refuses.
    """
    lease = Lease(files, root, _this_process(application))
    with contextlib.ExitStack() as locks:
        _await_turn(files, lease, root, locks)
        if isinstance(files, LocalFiles):
            files.delete_partial_files(root)
        lease.write()
        now = lease.read()
        if now and now["id"] != lease.holder["id"]:
            raise _in_use(root, now)
        keeper = threading.Thread(target=lease.keep, name="sparkdl-lease", daemon=True)
        keeper.start()
        try:
            yield lease
        finally:
            lease.end()
            keeper.join(RENEWED_EVERY_S)
            if isinstance(files, LocalFiles):  # nobody else has the lock
                with contextlib.suppress(OSError):
                    files.delete_file(posixpath.join(root, LOCK))


def belongs_to_lease(name: str) -> bool:
    """Whether a file in a directory that is held has to do with its lease."""
    return name.lstrip(".").startswith((LEASE, LOCK))


def _await_turn(files: Files, lease: Lease, root: str, locks: contextlib.ExitStack) -> None:
    """Return once nobody else holds a lease, with the lock if there can be one.

    Raises:
        InUseError: somebody else holds it.
    """
    started, waited_s, is_locked, found = time.monotonic(), 0.0, None, lease.read()
    while True:
        if is_locked is None:
            is_locked = isinstance(files, LocalFiles) and _lock(files, root, locks)
        now = lease.read()
        if is_locked is None:
            if waited_s > GRACE_S:
                raise _in_use(root, now)
        elif now is None or (is_locked and now["boot"] == lease.holder["boot"]):
            return  # nobody on this machine has the lock, so the writer is gone
        elif now != found:
            raise _in_use(root, now)
        elif waited_s > EXPIRES_S:
            logger.warning("%s was in use by %s, which is gone", root, _describe(now))
            return
        if not waited_s:
            logger.warning("%s is in use by %s; waiting for its end", root, _describe(now))
        time.sleep(RETRY_S)
        waited_s = time.monotonic() - started


def _lock(files: LocalFiles, root: str, locks: contextlib.ExitStack) -> bool | None:
    """Lock a directory; returns whether that is possible, None if somebody else has the lock."""
    path = posixpath.join(root, LOCK)
    with contextlib.ExitStack() as opened:
        try:
            # Opening it blocks too, where a file server has leased the file to another client.
            descriptor = files.open_private(path)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            logger.info("%s cannot be locked (%s)", root, error)
            return None if isinstance(error, BlockingIOError) else False
        if not files.is_at(os.fstat(descriptor), path):
            return None  # deleted by whoever had the lock before
        # Unlocked, because a process forked meanwhile would keep the lock otherwise.
        opened.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        locks.enter_context(opened.pop_all())
    return True


def _this_process(application: str | None) -> Holder:
    return {
        "id": uuid.uuid4().hex,
        "host": platform.node(),
        "boot": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node(),
        "process": str(os.getpid()),
        "application": application or Path(sys.argv[0]).name,
        "since": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "renewals": "0",
    }


def _describe(holder: Holder | None) -> str:
    if not holder or not holder["id"]:
        return "another process"
    process, application, host, since = map(holder.get, ("process", "application", "host", "since"))
    return f"process {process} ({application}) on {host} since {since}"


def _in_use(root: str, holder: Holder | None) -> InUseError:
    who = _describe(holder)
    return InUseError(
        f"checkpointPath '{without_credentials(root)}' is in use by {who}. Two trainings would mix "
        "up and delete each other's checkpoints: wait for it to end, or use another checkpointPath",
        who,
    )
