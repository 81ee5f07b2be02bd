"""The process from which ranks are forked: it has imported what they need, and runs nothing itself.

    task's process (``forked.py``)       this process                      a rank's process
    one byte, a channel and a lease -->  fork  ------------------------->  serves the channel
                                <------  on the lease: its number
    the lease closed            ------>  SIGKILL  ---------------------->
                                <------  on the lease: how it has ended

So a rank finds nothing of what ran before it, and does not wait until torch is imported. This
process has one thread of Python's, has not touched a GPU, and ends with the task's, as do those
that it has forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import NoReturn

import pyarrow as pa

from sparkdl.spark.launch.bootstrap import require
from sparkdl.spark.launch.forked import TELLS
from sparkdl.spark.launch.rank_process import serve

_PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``: which signal a process gets when the one that started it ends."""


def main() -> None:
    """Import, say so, and fork until the host has gone; who is forked serves its channel."""
    told = json.loads(sys.argv[1])
    del sys.argv[1:]  # nothing of the user's
    _end_with(told["host"], signal.SIGTERM)
    with socket.socket(fileno=told["control"]) as control:
        control.set_inheritable(False)
        refusal = _prepare(told["preload"], told["versions"])
        control.sendall(json.dumps(refusal).encode() + b"\n")
        channel = _Server(control).fork_on_request()
    serve(channel)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Not by the interpreter's own end: what libraries still hold there may wait for each other.
    os._exit(0)


def _prepare(preload: list[str], versions: dict[str, str]) -> str | None:
    """Import what ranks need; say what is missing for it."""
    gc.disable()
    try:
        require(versions)
        for name in preload:
            importlib.import_module(name)
        pa.array([])  # for which Arrow imports pandas, if there is one: half a second in each rank
    except RuntimeError as error:
        return str(error)
    # What the processes share stays shared: their collector would write to all of it.
    gc.freeze()
    gc.enable()
    return None


class _Server:
    """Forks when the host asks for it, and looks after what it has forked."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._leases: dict[int, socket.socket] = {}
        self._poll = select.poll()  # has no descriptor that a fork would share
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)

    def fork_on_request(self) -> socket.socket:
        """Serve the host; returns in each process that is forked, and there only: its channel."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        for descriptor in (self._woken, self._control.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            for process, lease in self._leases.items():
                if lease.fileno() in ready:
                    self._poll.unregister(lease)
                    _kill(process)
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if self._control.fileno() in ready and (channel := self._fork()) is not None:
                return channel

    def _fork(self) -> socket.socket | None:
        """Fork as the host asks; returns the channel in the new process."""
        asked, descriptors, _, _ = socket.recv_fds(self._control, 1, 2)
        if not asked:
            self._end()
        channel, lease = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        try:
            process = os.fork()
        except OSError as error:
            process = -(error.errno or errno.EAGAIN)
        if process == 0:
            self._become_a_rank()
            lease.close()
            return channel
        channel.close()
        with contextlib.suppress(OSError):  # the host has gone; its end is noticed next
            lease.sendall(TELLS.pack(process))
        if process > 0:
            self._leases[process] = lease
            self._poll.register(lease, select.POLLIN)
        else:
            lease.close()
        return None

    def _become_a_rank(self) -> None:
        """Drop what is the server's in a process that was just forked."""
        server = os.getppid()
        # As under torchrun: Linux shares the cores among sessions first, threads of several ranks
        # in one session keep each other waiting.
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._control.close()
        for descriptor in (self._woken, self._waker):
            os.close(descriptor)
        for lease in self._leases.values():
            lease.close()
        _end_with(server, signal.SIGKILL)
        if sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)

    def _reap(self) -> None:
        """Tell how processes have ended, and end what they have left running."""
        while self._leases:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)
            with self._leases.pop(process) as lease:
                with contextlib.suppress(KeyError):  # it was killed
                    self._poll.unregister(lease)
                with contextlib.suppress(OSError):  # nobody waits for it
                    lease.sendall(TELLS.pack(os.waitstatus_to_exitcode(status)))

    def _end(self) -> NoReturn:
        for process in self._leases:
            _kill(process)
        os._exit(0)


def _kill(process: int) -> None:
    """End a process that is not reaped yet, and its own; it may not lead a group so far."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _end_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel signal this process as soon as its parent ends, however that comes about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)  # it has ended before
