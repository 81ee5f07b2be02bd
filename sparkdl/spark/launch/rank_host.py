"""The ranks of one task: a process for each, fed with its share of the task's rows.

    task's process                      process of a rank (``serve``)
    its environment, pickled    ------>
    what to call, pickled       ------>
    b"R" and an Arrow stream    ------> its rows, if the task has any
    b"E"                        ------> there are no more
                                <------ the answer, pickled: record batches, or a traceback

Each rank has a socket pair of its own, since multiprocessing's pipes copy rows on both sides and
take five times as long. A rank's process ends with the task's, however that ends: the kernel sees
to it. Nothing here knows about Spark.

The processes are forked from a clean one, multiprocessing's fork server: a rank finds no traces of
what ran before it, and does not wait for torch to be imported. The server has a single Python
thread, has not touched a GPU, and ends with the task's process (``fork_server.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.machinery import FileFinder
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

import numpy as np
import pyarrow as pa

from sparkdl.errors import TrainingError, WorkerLostError
from sparkdl.feed.packed import ORDER_COLUMN
from sparkdl.process.interrupts import Interrupted
from sparkdl.user_code.tracebacks import traceback_of

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


ROWS = b"R"
END = b"E"
EXIT_S = 5.0
"""Seconds within which a process must end once it was told to, or has nothing left to do."""


@dataclass(frozen=True, kw_only=True)
class RankCall:
    """What the process of one rank does.

    Attributes:
        rank: the rank's number, for messages.
        entry: ``module:function``, called with ``*arguments`` and an iterator of record batches;
            yields record batches.
        arguments: values that can be pickled.
        environment: variables to set in the process before it calls anything.
    """

    rank: int
    entry: str
    arguments: tuple[Any, ...] = field(repr=False)  # the job's token is among them
    environment: Mapping[str, str] = field(default_factory=dict)


def host_ranks(
    calls: Sequence[RankCall], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run ranks side by side, each in a process of its own, until all have ended.

    Args:
        calls: what each rank does; the ranks of one task, in order.
        batches: the task's rows, distributed to the ranks by ``shares``.

    Yields:
        What all of them yield, in rank order.

    Raises:
        WorkerLostError: a process ended without an answer; the others are ended too, because the
            task has to read its rows again.
        TrainingError: a function raised; the message has its traceback.
    """
    with ExitStack() as stack:
        ranks = [stack.enter_context(_Rank(call)) for call in calls]
        _distribute(batches, ranks)
        _collect(ranks)
    for rank in ranks:
        yield from rank.answer or ()


def shares(batch: pa.RecordBatch, ranks: int) -> list[pa.RecordBatch]:
    """Split a record batch into the rows of each rank, the same ones in every run.

    By ``ORDER_COLUMN``, a hash, so that the arrival order does not matter, and ranks get about
    equally many rows. Rows without it, of a function that reads none, go to all.

    Args:
        batch: the rows.
        ranks: the number of ranks.
    """
    if ranks == 1 or ORDER_COLUMN not in batch.schema.names:
        return [batch] * ranks
    owners = batch.column(ORDER_COLUMN).to_numpy().view(np.uint64) % np.uint64(ranks)
    return [batch.take(np.flatnonzero(owners == index)) for index in range(ranks)]


class _Rank:
    """The process of one rank, seen from the task's; a context manager that ends it."""

    def __init__(self, call: RankCall) -> None:
        self.answer: list[pa.RecordBatch] | None = None
        self._call = call
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.process = fork(serve, theirs)
        self._input, self._output = self.channel.makefile("wb"), self.channel.makefile("rb")
        self._rows: pa.RecordBatchStreamWriter | None = None

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Before its channel is closed, which the process would take for the end of its rows.
        self.process.join(EXIT_S if kind is None else 0.0)
        self.process.kill()  # if it has not ended
        self.process.join(EXIT_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)  # what it has left running
        for each in (self._output, self.channel):
            each.close()
        with contextlib.suppress(OSError):  # there is output that it never read
            self._input.close()

    def call(self) -> None:
        """Tell the process what to do."""
        environment = first_environment() | dict(self._call.environment)
        for part in (environment, (self._call.entry, self._call.arguments)):
            self._tell(functools.partial(pickle.dump, part, self._input, protocol=5))

    def put(self, batch: pa.RecordBatch) -> None:
        """Pass rows on to the rank."""
        if batch.num_rows:
            self._tell(lambda: self._rows_like(batch).write_batch(batch))

    def end(self) -> None:
        """Tell the process that there are no more rows."""

        def write() -> None:
            if self._rows is not None:
                self._rows.close()
            self._input.write(END)

        self._tell(write)

    def receive(self) -> None:
        """Wait for its answer.

        Raises:
            WorkerLostError: it ended without one.
            TrainingError: its function raised.
        """
        try:
            answer = pickle.load(self._output)  # from a process of our own
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self.lost() from None
        if isinstance(answer, str):
            raise TrainingError(f"rank {self._call.rank} on {socket.gethostname()}: {answer}")
        self.answer = answer

    def lost(self) -> WorkerLostError:
        """The error that says how its process ended."""
        self.process.join(EXIT_S)
        code = self.process.exitcode
        if code in (None, 255):  # the latter for whatever has ended with its server, too
            how = "left with code 255, closed its connection, or ended with what it was forked from"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code} and no answer, as with os._exit({code})"
        return WorkerLostError(
            f"the process {self.process.pid} of rank {self._call.rank} on "
            f"{socket.gethostname()} {how}"
        )

    def _rows_like(self, batch: pa.RecordBatch) -> pa.RecordBatchStreamWriter:
        if self._rows is None:
            self._input.write(ROWS)
            self._rows = pa.ipc.new_stream(self._input, batch.schema)
        return self._rows

    def _tell(self, write: Callable[[], object]) -> None:
        """Write, unless the rank has answered; if it no longer listens, find out why."""
        if self.answer is not None:
            return
        try:
            write()
            self._input.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.receive()


def _distribute(batches: Iterable[pa.RecordBatch], ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.call()
    for batch in batches:
        for rank, share in zip(ranks, shares(batch, len(ranks)), strict=True):
            rank.put(share)
        if all(rank.answer is not None for rank in ranks):
            break
    for rank in ranks:
        rank.end()


def _collect(ranks: Sequence[_Rank]) -> None:
    channels = {rank.channel: rank for rank in ranks if rank.answer is None}
    sentinels = {rank.process.sentinel: rank for rank in channels.values()}
    while channels:
        ready = multiprocessing.connection.wait([*channels, *sentinels])
        # Channels first: a process may end as soon as it has answered.
        for channel in [each for each in channels if each in ready]:
            rank = channels.pop(channel)
            del sentinels[rank.process.sentinel]
            rank.receive()
        for sentinel in [each for each in sentinels if each in ready]:
            # The channel alone does not tell: a child of the process may keep it open.
            raise sentinels[sentinel].lost()


def serve(channel: socket.socket) -> NoReturn:
    """In a rank's process: call one function, answer with what it yields, and exit.

    Args:
        channel: leads to the host.
    """
    become_rank()
    # The fork left every process with the same state.
    np.random.seed()
    random.seed()
    with channel, channel.makefile("rb") as source, channel.makefile("wb") as sink:
        pickle.dump(_answer(source), sink, protocol=5)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Skips the interpreter's shutdown, where things that libraries still hold may deadlock.
    os._exit(0)


def _look_into_folders_again() -> None:
    """Do as ``importlib.invalidate_caches``, which would read the lists of zip files anew too."""
    for path, finder in [*sys.path_importer_cache.items()]:
        if finder is None:  # there was no such folder when the server began
            del sys.path_importer_cache[path]
        elif isinstance(finder, FileFinder):
            finder.invalidate_caches()


def _answer(source: BinaryIO) -> list[pa.RecordBatch] | str:
    try:
        set_environment(pickle.load(source))  # from the process that started this one
        _look_into_folders_again()
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
