"""The process from which ranks are forked: it imports what they need, and runs nothing itself.

    task's process (``forked.py``)       this process                      a rank's process
    one byte, a channel and a lease -->  fork  ------------------------->  serves the channel
                                <------  on the lease: its process ID
    the lease closed            ------>  SIGKILL  ---------------------->
                                <------  on the lease: how it ended

So a rank finds no traces of what ran before it, and does not wait for torch to be imported. This
process has a single Python thread, has not touched a GPU, and ends with the task's process, as do
the processes that it has forked.
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
from sparkdl.spark.launch.rank_host import serve

_PR_SET_PDEATHSIG = 1
"""The ``prctl`` option of Linux that sets the signal a process gets when its parent ends."""


def main() -> None:
    """Import, say so, and fork until the host has gone; each forked process serves its channel."""
    told = json.loads(sys.argv[1])
    del sys.argv[1:]  # these are not the user's arguments
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
    # Skips the interpreter's shutdown, where things that libraries still hold may deadlock.
    os._exit(0)


def _prepare(preload: list[str], versions: dict[str, str]) -> str | None:
    """Import what ranks need; return what is missing, if anything is."""
    gc.disable()
    try:
        require(versions)
        for name in preload:
            importlib.import_module(name)
        pa.array([])  # makes Arrow import pandas, if it is there: half a second in each rank
    except RuntimeError as error:
        return str(error)
    # Keeps the pages shared between the processes: a collection would write to all of them.
    gc.freeze()
    gc.enable()
    return None


class _Server:
    """Forks when the host asks it to, and looks after the processes that it has forked."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._leases: dict[int, socket.socket] = {}
        self._poll = select.poll()  # unlike epoll, has no descriptor that a fork would share
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)

    def fork_on_request(self) -> socket.socket:
        """Serve the host; returns only in a forked process, and there gives its channel."""
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
        """Fork as the host asks; in the new process, return its channel."""
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
        with contextlib.suppress(OSError):  # the host has gone, which the next poll will show
            lease.sendall(TELLS.pack(process))
        if process > 0:
            self._leases[process] = lease
            self._poll.register(lease, select.POLLIN)
        else:
            lease.close()
        return None

    def _become_a_rank(self) -> None:
        """Drop what belongs to the server, in a process that was just forked."""
        server = os.getppid()
        # As under torchrun: Linux divides the cores among sessions first, and the threads of
        # several ranks in one session would keep each other waiting.
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
        """Report how processes ended, and kill what they left running."""
        while self._leases:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)
            with self._leases.pop(process) as lease:
                with contextlib.suppress(KeyError):  # it was killed
                    self._poll.unregister(lease)
                with contextlib.suppress(OSError):  # nobody is waiting for it
                    lease.sendall(TELLS.pack(os.waitstatus_to_exitcode(status)))

    def _end(self) -> NoReturn:
        for process in self._leases:
            _kill(process)
        os._exit(0)


def _kill(process: int) -> None:
    """Kill a process that is not reaped yet, and its group, which it may not lead yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _end_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel signal this process as soon as its parent ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)  # it ended before the call above
