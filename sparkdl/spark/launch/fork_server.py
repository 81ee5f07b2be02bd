"""What the process from which ranks are forked imports, and no other; see ``forked.py``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path

import pyarrow as pa

from sparkdl.spark.launch.forked import end_with_parent

_SERVER, _TASK = os.getpid(), os.getppid()


def _end(number: int, frame: object) -> None:
    """End the ranks and what they have started; nobody else removes the file of the socket."""
    if os.getpid() == _SERVER:  # others that are forked here have this handler too
        for child in Path(f"/proc/self/task/{_SERVER}/children").read_text().split():
            with contextlib.suppress(OSError):
                os.killpg(int(child), signal.SIGKILL)
        with contextlib.suppress(OSError, TypeError, ValueError):
            address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
            until = time.monotonic() + 0.5  # the task's threads do not all end at once
            while os.getppid() == _TASK and time.monotonic() < until:
                time.sleep(0.01)
            if os.getppid() != _TASK:
                os.unlink(address)
                os.rmdir(os.path.dirname(address))
    os._exit(128 + number)


os.setsid()
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
