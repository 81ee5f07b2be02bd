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
"""What goes over a lease: the process ID, or the negated errno if no process could be made; then
the code with which the process ended, negative for a signal."""
EXIT_S = 5.0
"""Seconds within which a process must end once it was told to, or has nothing left to do."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from sparkdl.spark.launch.fork_server import main; main()"
)


class ForkServer:
    """A child of this process that forks others; it ends with this process, and they with it.

    Args:
        preload: modules to import before the first fork.
        versions: the driver's versions of the packages that must match, by import name.
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
        self._ready = False

    def wait_until_ready(self) -> None:
        """Wait until it has imported what is to be preloaded, which its start does not.

        Raises:
            RuntimeError: a package is missing or has another version.
            TrainingError: the process ended at once.
        """
        if self._ready:
            return
        with self._control.makefile("rb") as answers:
            answer = answers.readline()
        if not answer:
            self.close()
            raise TrainingError(
                "the process from which ranks are forked exited at once on "
                f"{socket.gethostname()}, with code {self._process.returncode}"
            )
        if refusal := json.loads(answer):
            self.close()
            raise RuntimeError(refusal)
        self._ready = True

    @property
    def is_there(self) -> bool:
        """Whether it is still running, so that it can fork."""
        return self._process.poll() is None

    def fork(self, channel: socket.socket) -> ForkedProcess:
        """Fork a process that serves a channel; see ``rank_host.serve``.

        Args:
            channel: the new process's end, which the caller may close afterwards.

        Raises:
            RuntimeError: a package is missing or has another version.
            TrainingError: the system refuses, or the server has ended.
        """
        self.wait_until_ready()
        lease, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"F"], [channel.fileno(), theirs.fileno()])
            except OSError as error:
                lease.close()
                raise TrainingError(f"the process from which ranks are forked: {error}") from error
        return ForkedProcess(lease)

    def close(self) -> None:
        """End the server and the processes that it has forked."""
        self._control.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """A process that was forked; a context manager that ends it.

    Args:
        lease: leads to the server, which kills the process once nobody holds this end any more.

    Attributes:
        number: its process ID.

    Raises:
        TrainingError: the system cannot make a process, or the server has ended.
    """

    def __init__(self, lease: socket.socket) -> None:
        self.lease = lease
        self._code: int | None = None
        number = self._receive()
        if number is None or number < 0:
            lease.close()
            why = os.strerror(-number) if number else "the process to fork it from has exited"
            raise TrainingError(f"no process for a rank on {socket.gethostname()}: {why}")
        self.number = number

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait(EXIT_S)
        with contextlib.suppress(OSError):  # the server has ended
            self.lease.shutdown(socket.SHUT_WR)  # makes the server kill a process still running
        self.wait(EXIT_S)
        self.lease.close()

    def wait(self, patience_s: float) -> int | None:
        """Its exit code, negative for a signal; None if it has not ended or nobody can tell.

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
    """The fork server of this process, started on the first call and kept."""
    global _server
    if _server is None or not _server.is_there:
        _server = ForkServer(preload, versions)
    return _server


def search_path() -> list[str]:
    """Where this process looks for modules, for a process with another working directory."""
    return [each for each in sys.path if each]


def _first_environment() -> dict[str, str]:
    """The variables with which this process began, where the system tells.

    In a Python worker these are the daemon's: tasks of other programs may have changed them since.
    """
    try:
        entries = [each for each in Path("/proc/self/environ").read_bytes().split(b"\0") if each]
        return {
            os.fsdecode(name): os.fsdecode(v) for name, v in (e.split(b"=", 1) for e in entries)
        }
    except (OSError, ValueError):  # another system, or a program that writes its title there
        return dict(os.environ)


def _first_directory() -> str | None:
    """The working directory of the parent, Spark's daemon: tasks may have left this process's."""
    directory = f"/proc/{os.getppid()}/cwd"
    return directory if os.path.isdir(directory) else None
