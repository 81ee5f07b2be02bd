"""What a piece of code does to the world around it, told by Python's own audit events."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_HARMLESS = {
    *("builtins.id", "object.__delattr__", "object.__getattr__", "object.__setattr__"),
    *("os.listdir", "os.scandir", "pathlib.Path.glob", "sys._getframe"),
}
_STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "socket.bind", "subprocess.Popen"}
_watching: dict[int, list[str]] = {}
_started: list[list[str]] = []


@contextmanager
def deeds() -> Iterator[list[str]]:
    """What this thread does inside the block: imports, calls of the system, files written, ...

    Reading a file is none, and neither is what torch and pyspark import of themselves.
    """
    _hook_once()
    found: list[str] = []
    _watching[threading.get_ident()] = found
    try:
        yield found
    finally:
        del _watching[threading.get_ident()]


@contextmanager
def starts() -> Iterator[list[str]]:
    """Processes, and ports, that any thread of this process asks for inside the block."""
    _hook_once()
    found: list[str] = []
    _started.append(found)
    try:
        yield found
    finally:
        _started.remove(found)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _started and event in _STARTS:
        _started[-1].append(f"{event} {arguments!r:.200}")
    found = _watching.get(threading.get_ident())
    if found is not None and event not in _HARMLESS and not _is_reading(event, arguments):
        found.append(f"{event} {arguments!r:.200}")


def _is_reading(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "import":
        return arguments[0].partition(".")[0] in ("torch", "pyspark", "pyspark_connect")
    changes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    return event == "open" and not arguments[2] & changes


def _hook_once() -> None:
    if not getattr(sys, "_sparkdl_tests_audit", False):
        sys._sparkdl_tests_audit = True  # type: ignore[attr-defined]  # a hook stays for ever
        sys.addaudithook(_audit)
