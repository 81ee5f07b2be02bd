"""Waiting for what comes by itself, and no longer than it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 30.0
"""The longest that a test waits for anything; it never lasts so long, however busy the machine."""


def eventually(question: Callable[[], object], wait_s: float = WAIT_S) -> bool:
    """Whether something becomes true."""
    until = time.monotonic() + wait_s
    while not (answer := question()) and time.monotonic() < until:
        time.sleep(0.005)
    return bool(answer or question())


def is_there(pid: int) -> bool:
    """Whether a process runs; one that nobody has asked for since it ended does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def eventually_gone(pid: int) -> bool:
    """Whether a process ends."""
    return eventually(lambda: not is_there(pid), 60)
