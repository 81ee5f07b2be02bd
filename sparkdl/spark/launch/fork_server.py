"""What the process from which ranks are forked imports, and no other; see ``rank_host.py``."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pyarrow as pa

from sparkdl.spark.launch.rank_host import EXIT_S, end_with_parent

_SERVER, _TASK = os.getpid(), os.getppid()


def _find_address() -> str:
    """The file of the socket at which the task asks for ranks; empty if this is no server."""
    # ``forkserver.main`` is called with its listener's descriptor, and says so nowhere else.
    found = re.findall(r"main\((\d+)", sys.orig_argv[-1])
    if not found:
        return ""
    with socket.socket(fileno=os.dup(int(found[0]))) as listener:
        return str(listener.getsockname())


_ADDRESS = _find_address()


def _remove_socket() -> None:
    """Remove the file of the socket: nobody else does if the task has been killed.

    By its name, as the socket itself may be closed by now. A rank runs what is registered here too.
    """
    if os.getpid() == _SERVER:
        with contextlib.suppress(OSError):
            os.unlink(_ADDRESS)
            os.rmdir(os.path.dirname(_ADDRESS))


def _end(number: int, frame: object) -> None:
    """End the ranks and what they have started; nobody else removes the file of the socket."""
    if os.getpid() == _SERVER:  # others that are forked here have this handler too
        for child in Path(f"/proc/self/task/{_SERVER}/children").read_text().split():
            with contextlib.suppress(OSError):
                os.killpg(int(child), signal.SIGKILL)
        until = time.monotonic() + EXIT_S  # on a busy host the task's threads end one by one
        while os.getppid() == _TASK and time.monotonic() < until:
            time.sleep(0.01)
        if os.getppid() != _TASK:
            _remove_socket()
    os._exit(128 + number)


os.setsid()
atexit.register(_remove_socket)  # where it ends because nobody can ask for ranks any more
signal.signal(signal.SIGTERM, _end)
end_with_parent(signal.SIGTERM)
gc.disable()
for module in ("launch.assignment", "launch.task", "functions.task"):
    with contextlib.suppress(ImportError):  # the rank says what is missing
        importlib.import_module(f"sparkdl.spark.{module}")
pa.array([])  # makes Arrow import pandas, if it is there: half a second in each rank
# Keeps the pages shared between the processes: a collection would write to all of them.
gc.freeze()
gc.enable()
