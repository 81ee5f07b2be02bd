"""Processes of ranks: forked from a clean one, by multiprocessing's fork server.

So a rank finds no traces of what ran before it, and does not wait for torch to be imported. The
server has a single Python thread, has not touched a GPU, and ends with the task's process, as do
the processes that it has forked (``fork_server.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from sparkdl.errors import TrainingError

_FORKED = multiprocessing.get_context("forkserver")
_NAME = "MainProcess"
"""Programs ask whether they run in a process of this name, as they do under torchrun."""
_PR_SET_PDEATHSIG = 1
"""The ``prctl`` option of Linux that sets the signal a process gets when its parent ends."""


def start_server() -> None:
    """Start this process's server unless it is running; does not wait for what it imports."""
    _FORKED.set_forkserver_preload(["sparkdl.spark.launch.fork_server"])
    with _as_begun():
        forkserver.ensure_running()


def fork(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Fork a process that calls ``become_rank`` first.

    Args:
        target: what it calls, found by its name.
        arguments: for the target.

    Raises:
        TrainingError: the server has ended, or cannot make a process.
    """
    process = _FORKED.Process(target=target, args=arguments, name=_NAME)
    try:
        start_server()
        with _as_begun():
            process.start()
    except (OSError, EOFError) as error:
        raise TrainingError(
            f"no process for a rank on {socket.gethostname()}: the process to fork it from has "
            f"exited ({error!r}); the executor's log says why"
        ) from error
    return process


def end_ranks() -> None:
    """Kill the processes of ranks that this one has."""
    for each in multiprocessing.active_children():
        if each.name == _NAME:
            each.kill()


def become_rank() -> None:
    """Drop what belongs to the server or the task, in a process that was just forked."""
    # As under torchrun: Linux divides the cores among sessions first, and the threads of several
    # ranks in one session would keep each other waiting.
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)  # the server ended before the call above
    sys.argv[:] = ["-c"]  # the task's are not the user's arguments
    multiprocessing.set_start_method(None, force=True)  # it is the user's to set
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel signal this process as soon as its parent ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def first_environment() -> dict[str, str]:
    """The variables with which this process began, where the system tells.

    In a Python worker these are the daemon's: tasks of other programs may have changed them since.
    """
    try:
        entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
        return dict(entry.split("=", 1) for entry in entries if entry)
    except (OSError, ValueError):  # another system, or a program that writes its title there
        return dict(os.environ)


@contextlib.contextmanager
def _as_begun() -> Iterator[None]:
    """Be as this process was when it began, as far as one that it starts would feel it.

    The server finds modules where this process does; a rank does not import the program's file.
    """
    environment, main = dict(os.environ), sys.modules["__main__"]
    method, temporary = multiprocessing.get_start_method(allow_none=True), tempfile.gettempdir()
    here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))  # it may have been deleted
    try:
        with contextlib.suppress(OSError):  # not on every system
            os.chdir(f"/proc/{os.getppid()}/cwd")  # of Spark's daemon
        path = os.pathsep.join(filter(None, sys.path))
        set_environment(first_environment() | {"PYTHONPATH": path})
        # The path of the server's socket has at most 107 bytes.
        tempfile.tempdir = temporary if len(temporary) < 70 else "/tmp"
        sys.modules["__main__"] = ModuleType("__main__")
        yield
    finally:
        sys.modules["__main__"], tempfile.tempdir = main, temporary
        set_environment(environment)
        os.fchdir(here)
        os.close(here)
        multiprocessing.set_start_method(method, force=True)


def set_environment(environment: dict[str, str]) -> None:
    """Set this process's variables, all of them."""
    os.environ.clear()
    os.environ.update(environment)
