"""What a file system may hold after its power was cut, at every point of a program that writes.

POSIX promises of a file's bytes what ``fsync`` of the file has seen, and of its name what ``fsync``
of its directory has seen; all else may be lost, kept or torn, each independently of the others. The
recorder looks at a directory before and after each operation that changes it, so it need not be
told what was written, by whom and in which language; only ``fsync`` is taken from the calls.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

HOOKED = ("open", "close", "fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir")

_open = os.open

Entries = dict[str, int]
"""Inodes by name."""
Pick = Callable[[int], int]
"""Chooses one of so many possibilities."""


@dataclass(frozen=True)
class Inode:
    """A file or directory: what is safe of it, and what came since.

    Attributes:
        safe: bytes, or entries, at the last ``fsync``.
        since: of a file what it held after each change since; of a directory its changes, where
            None stands for a name that was removed.
    """

    safe: Any
    since: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Point:
    """An instant at which the power may be cut.

    Attributes:
        inodes: all that were not yet lost for good, by number.
        root: number of the directory that was watched.
        returned: what the program had noted by then.
    """

    inodes: dict[int, Inode]
    root: int
    returned: tuple[Any, ...]

    def survives(self, target: Path, pick: Pick) -> None:
        """Write what is left after the cut into a new directory.

        Args:
            target: the directory.
            pick: chooses among what may have become of each part; 0 is that nothing unsafe was
                kept, the last that everything was.
        """
        self._write(self.root, target, pick)

    def _write(self, number: int, target: Path, pick: Pick) -> None:
        inode = self.inodes[number]
        if isinstance(inode.safe, bytes):
            versions = [inode.safe, *inode.since]
            if inode.since:  # torn, or long enough but without the bytes
                last = inode.since[-1]
                versions[1:1] = [last[: len(last) // 2], bytes(len(last))]
            target.write_bytes(versions[pick(len(versions))])
            return
        target.mkdir()
        entries: dict[str, int | None] = dict(inode.safe)
        for change in inode.since:
            if pick(2):
                entries |= change
        for name, child in entries.items():
            if child is not None:
                self._write(child, target / name, pick)


@dataclass
class Recorder:
    """Watches a directory while a program writes below it; see ``recorded``.

    Attributes:
        points: the instants at which the power may be cut, in order.
    """

    root: Path
    points: list[Point] = field(default_factory=list)
    _inodes: dict[int, Inode] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)
    _returned: tuple[Any, ...] = ()

    def note(self, promise: Any) -> None:
        """Something has returned that has to last from here on."""
        self._returned = (*self._returned, promise)
        self.look()

    def look(self) -> None:
        """Take in what has changed."""
        present = self._present()
        for number, now in present.items():
            known = self._inodes.get(number, Inode(type(now)()))
            if isinstance(now, bytes):
                changed = now != (known.since[-1] if known.since else known.safe)
                since = (*known.since, now) if changed else known.since
            else:
                since = (*known.since, change) if (change := _change(known, now)) else known.since
            self._inodes[number] = Inode(known.safe, since)
        self.points.append(Point(dict(self._inodes), self.root.stat().st_ino, self._returned))

    def synced(self, number: int) -> None:
        """A file or directory has become safe."""
        if (now := self._present().get(number)) is not None:
            self._inodes[number] = Inode(now)
            self.points.append(Point(dict(self._inodes), self.root.stat().st_ino, self._returned))

    def _present(self) -> dict[int, Any]:
        found = {}
        for path, now in _tree(self.root):
            number = path.lstat().st_ino
            found[number] = now
            if number not in self._held:  # lest the number be given to something new
                self._held[number] = _open(path, os.O_PATH | os.O_NOFOLLOW)
        return found

    def close(self) -> None:
        """Look no more."""
        for descriptor in self._held.values():
            os.close(descriptor)


@contextmanager
def recorded(root: Path) -> Iterator[Recorder]:
    """Watch a directory; what is in it at the beginning is safe."""
    recorder = Recorder(root)
    recorder._inodes = {number: Inode(now) for number, now in recorder._present().items()}
    recorder.look()
    busy = False
    one_thread = threading.RLock()

    def hooked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal busy
            # A thread that renews a lease must not pass for our own look: an fsync would be missed.
            with one_thread:
                if busy:  # our own look
                    return original(*arguments, **named)
                busy = True
                try:
                    recorder.look()
                    number = os.fstat(arguments[0]).st_ino if name == "fsync" else None
                    result = original(*arguments, **named)
                    recorder.look()
                    if number is not None:
                        recorder.synced(number)
                    return result
                finally:
                    busy = False

        return call

    with patch.multiple(os, **{name: hooked(name, getattr(os, name)) for name in HOOKED}):
        yield recorder
    recorder.look()
    recorder.close()


def cuts(recorder: Recorder, scratch: Path, draws: int = 4) -> Iterator[tuple[Point, Path]]:
    """Every point with what may be left then: nothing unsafe, all of it, and draws in between."""
    generator = random.Random(0)
    picks: list[Pick] = [lambda many: 0, lambda many: many - 1, *[generator.randrange] * draws]
    seen = set()
    for number, point in enumerate(recorder.points):
        if repr(point) in seen:
            continue
        seen.add(repr(point))
        for index, pick in enumerate(picks):
            left = scratch / f"{number}-{index}"
            point.survives(left, pick)
            yield point, left


def _tree(directory: Path) -> Iterator[tuple[Path, bytes | Entries]]:
    entries: Entries = {}
    for entry in os.scandir(directory):
        entries[entry.name] = entry.inode()
        if entry.is_dir(follow_symlinks=False):
            yield from _tree(Path(entry.path))
        else:
            yield Path(entry.path), Path(entry.path).read_bytes()
    yield directory, entries


def _change(known: Inode, now: Entries) -> dict[str, int | None]:
    before: dict[str, int | None] = dict(known.safe)
    for change in known.since:
        before |= change
    names = {name for name, number in before.items() if number is not None} | set(now)
    return {name: now.get(name) for name in names if now.get(name) != before.get(name)}
