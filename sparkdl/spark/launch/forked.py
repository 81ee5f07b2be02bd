"""Processes that are forked from a clean one: how a task starts, awaits and ends them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkdl.errors import TrainingError

TELLS = struct.Struct("<q")
"""What goes over a lease: the number of the process, or less than 0 for the error that kept it
from being made; then the code with which it has ended, less than 0 for a signal."""
EXIT_S = 5.0
"""Seconds for a process to end that was told to, or that has nothing left to do."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from sparkdl.spark.launch.fork_server import main; main()"
)


class ForkServer:
    """A process of this one's that forks others; ends with this one, and they with it.

    Args:
        preload: modules to import before the first fork.
        versions: the driver's versions of the packages that must match, by import name.

    Raises:
        RuntimeError: a package is missing, or of another version.
        TrainingError: the process has ended at once.
    """

    def __init__(self, preload: Sequence[str], versions: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            told = {
                "path": search_path(),
                "host": os.getpid(),
                "control": theirs.fileno(),
                "preload": list(preload),
                "versions": dict(versions),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(told)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_first_environment(),
                cwd=_first_directory(),
                start_new_session=True,
            )
        with self._control.makefile("rb") as answers:
            answer = answers.readline()
        if not answer:
            self.close()
            raise TrainingError(
                f"the process from which ranks are forked has ended at once on "
                f"{socket.gethostname()}, with code {self._process.returncode}"
            )
        if refusal := json.loads(answer):
            self.close()
            raise RuntimeError(refusal)

    @property
    def is_there(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def fork(self, channel: socket.socket) -> ForkedProcess:
        """Fork a process that serves a channel; see ``rank_process``.

        Args:
            channel: its end, which the caller may close.

        Raises:
            TrainingError: the system refuses, or the server has ended.
        """
        lease, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"F"], [channel.fileno(), theirs.fileno()])
            except OSError as error:
                lease.close()
                raise TrainingError(f"the process from which ranks are forked: {error}") from error
        return ForkedProcess(lease)

    def close(self) -> None:
        """End it, and what it has forked."""
        self._control.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """One that was forked; a context manager that ends it.

    Args:
        lease: leads to the server, which ends the process when nobody holds this end any more.

    Attributes:
        number: the system's for it.

    Raises:
        TrainingError: the system makes no process, or the server has ended.
    """

    def __init__(self, lease: socket.socket) -> None:
        self.lease = lease
        self._code: int | None = None
        number = self._receive()
        if number is None or number < 0:
            lease.close()
            why = os.strerror(-number) if number else "the one to fork it from has ended"
            raise TrainingError(f"no process for a rank on {socket.gethostname()}: {why}")
        self.number = number

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait(EXIT_S)
        with contextlib.suppress(OSError):  # the server has ended
            self.lease.shutdown(socket.SHUT_WR)  # by which it kills what has not ended
        self.wait(EXIT_S)
        self.lease.close()

    def wait(self, patience_s: float) -> int | None:
        """How it has ended: its code, less than 0 for a signal; None if it has not, or by whom.

        Args:
            patience_s: how long to wait for its end, in seconds.
        """
        if self._code is None and multiprocessing.connection.wait([self.lease], patience_s):
            self._code = self._receive()
        return self._code

    def _receive(self) -> int | None:
        told = self.lease.recv(TELLS.size)
        return TELLS.unpack(told)[0] if told else None


_server: ForkServer | None = None


def fork_server(preload: Sequence[str], versions: Mapping[str, str]) -> ForkServer:
    """This process's, started at the first call and kept; see ``ForkServer``."""
    global _server
    if _server is None or not _server.is_there:
        _server = ForkServer(preload, versions)
    return _server


def search_path() -> list[str]:
    """Where this process looks for modules, for one whose working directory is another."""
    return [each for each in sys.path if each]


def _first_environment() -> dict[str, str]:
    """The variables with which this process has begun, where the system says so.

    In a Python worker of Spark's the daemon's: other programs' tasks may have changed them since.
    """
    try:
        entries = [each for each in Path("/proc/self/environ").read_bytes().split(b"\0") if each]
        return {
            os.fsdecode(name): os.fsdecode(v) for name, v in (e.split(b"=", 1) for e in entries)
        }
    except (OSError, ValueError):  # another system, or a program that writes its title there
        return dict(os.environ)


def _first_directory() -> str | None:
    """That of the process which has started this one, Spark's daemon: tasks may leave theirs."""
    directory = f"/proc/{os.getppid()}/cwd"
    return directory if os.path.isdir(directory) else None
