"""The process of one rank of several in a task; ``rank_host.py`` starts it and says what to do."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from sparkdl.spark.launch.rank_host import END, ROWS

_PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``: which signal a process gets when the one that started it ends."""


def serve(descriptor: int, host: int) -> None:
    """Call one function, answer with what it yields, and return.

    Args:
        descriptor: of the socket that leads to the host.
        host: the host's process.
    """
    _end_with(host)
    del sys.argv[1:]  # nothing of the user's
    with socket.socket(fileno=descriptor) as line:
        line.set_inheritable(False)
        with line.makefile("rb") as source, line.makefile("wb") as sink:
            pickle.dump(_answer(source), sink, protocol=5)


def _answer(source: BinaryIO) -> list[pa.RecordBatch] | str:
    try:
        entry, arguments = pickle.load(source)  # from the process that started this one
        module, name = entry.split(":")
        function = getattr(importlib.import_module(module), name)
        return list(function(*arguments, _rows(source)))
    except Exception:  # whatever it is, the host has to know
        return traceback.format_exc().rstrip()


def _rows(source: BinaryIO) -> Iterator[pa.RecordBatch]:
    sign = source.read(1)
    if sign == ROWS:
        yield from pa.ipc.open_stream(source)
        sign = source.read(1)
    if sign != END:
        os._exit(1)  # the host has died among its rows: those that are here are not all


def _end_with(host: int) -> None:
    """Have the kernel kill this process as soon as the host ends, however that comes about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != host:
        os._exit(1)  # it has ended before
