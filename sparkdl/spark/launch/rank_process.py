"""The process of one rank; ``rank_host.py`` says what it does."""

from __future__ import annotations

import importlib
import os
import pickle
import random
import socket
import sys
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from sparkdl.process.interrupts import Interrupted
from sparkdl.spark.launch.rank_host import END, ROWS
from sparkdl.user_code.tracebacks import traceback_of


def serve(channel: socket.socket) -> None:
    """Call one function, and answer with what it yields.

    Args:
        channel: leads to the host.
    """
    # The fork left every process with the same state.
    np.random.seed()
    random.seed()
    with channel, channel.makefile("rb") as source, channel.makefile("wb") as sink:
        pickle.dump(_answer(source), sink, protocol=5)


def _answer(source: BinaryIO) -> list[pa.RecordBatch] | str:
    try:
        sys.path[:], environment = pickle.load(source)  # from the process that started this one
        os.environ.update(environment)
        importlib.invalidate_caches()
        entry, arguments = pickle.load(source)
        module, name = entry.split(":")
        function = getattr(importlib.import_module(module), name)
        return list(function(*arguments, _rows(source)))
    except Interrupted:
        raise
    except BaseException as error:  # the host has to know, whatever it is
        return traceback_of(error)


def _rows(source: BinaryIO) -> Iterator[pa.RecordBatch]:
    sign = source.read(1)
    if sign == ROWS:
        yield from pa.ipc.open_stream(source)
        sign = source.read(1)
    if sign != END:
        os._exit(1)  # the host died while sending rows: those received are not all of them
