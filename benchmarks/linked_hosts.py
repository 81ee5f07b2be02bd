"""A driver and workers on hosts of their own with links of limited speed, without Spark or a JVM.

Every host, including the driver's, is a network namespace (``tests/cluster/hosts.py``), and all
links have the same speed. For each training, one process per host is forked from a process that has
imported everything, and enters its host: so it begins within milliseconds, and finds no traces of
earlier ones. Links have limited speed but no delay worth mentioning, and all hosts share the cores
of this machine. Needs root, and the programs of iproute2 and util-linux.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import cloudpickle
import torch

from sparkdl.averager.service.server import Averager, EdgeOptions
from sparkdl.collective import Network
from sparkdl.driver import RunOptions, run
from sparkdl.planner.profile import Profile
from sparkdl.testing import Shard
from sparkdl.worker import Job, Placement, train

FOLDER = Path(__file__).resolve().parent
POLL_S = 0.002
CLONE_NEWNET = 0x40000000
CLONE_NEWUTS = 0x04000000
"""Linux's flags for a network namespace and for a host name namespace."""
END_S = 600.0
TOKEN_BUCKET_S = 0.002
"""How long a link that was idle may exceed its speed."""


class LinkedHosts:
    """Some workers' hosts and the driver's; a context manager that takes them down again.

    Args:
        workers: the number of workers.
        folder: where their files go.

    Attributes:
        addresses: of all hosts, the driver's first.
    """

    def __init__(self, workers: int, folder: Path) -> None:
        sys.path.insert(0, str(FOLDER.parent / "tests" / "cluster"))
        from hosts import Hosts  # type: ignore[import-not-found]

        self._folder = folder
        # Each host's name is unknown to all others, which torch would warn about.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._context = multiprocessing.get_context("forkserver")
        # The forking process has imported all that a script imports at the top level, which each
        # fork runs again; it finds the modules by the environment alone.
        paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        self._context.set_forkserver_preload([__name__, "harness"])
        self._hosts = Hosts(workers + 1, folder)
        self.addresses: list[str] = [host.address for host in self._hosts.hosts]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hosts.close()

    def limit(self, mbit: float) -> None:
        """Limit each link in both directions to a speed in megabits per second."""
        burst = max(16, round(mbit * 1e6 / 8 * TOKEN_BUCKET_S / 1000))
        for host in self._hosts.hosts:
            host.limit(mbit, burst_kb=burst)

    def train(self, job: Job, shards: Sequence[Shard], deadline_s: float = 300.0) -> Profile:
        """Train on all hosts, and return what that cost.

        Args:
            job: what is trained.
            shards: the rows of each worker; fewer workers than there are hosts leave the last ones
                idle.
            deadline_s: seconds within which it has to end.

        Raises:
            TimeoutError: it is not over by then.
            RuntimeError: it failed; the message has the traceback.
        """
        driver = self.addresses[0]
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            parts: list[Callable[[], Any]] = [partial(_drive, job, len(shards), folder, driver)]
            parts += [
                partial(_work, job, shard, rank, folder, driver)
                for rank, shard in enumerate(shards)
            ]
            profile: Profile = self.call(parts, deadline_s)[0]
        return profile

    def call(self, parts: Sequence[Callable[[], Any]], deadline_s: float = 120.0) -> list[Any]:
        """Call a function on each host, the driver's first, or on the first hosts.

        Args:
            parts: the functions.
            deadline_s: seconds within which they have to return.

        Returns:
            What they return, in the same order.

        Raises:
            TimeoutError: one has not returned by then.
            RuntimeError: one failed; the message has the traceback.
        """
        deadline = time.monotonic() + deadline_s
        processes, answers = [], []
        try:
            for host, part in zip(self._hosts.hosts, parts, strict=False):
                ours, theirs = self._context.Pipe(duplex=False)
                place = f"/run/netns/{host.namespace}", host.name
                process = self._context.Process(
                    target=_call_on_host, args=(theirs, *place, cloudpickle.dumps(part))
                )
                process.start()
                theirs.close()
                processes.append((host, process, ours))
            for host, _, ours in processes:
                if not ours.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"{host.name} still ran after {deadline_s:g} s")
                succeeded, answer = ours.recv()
                if not succeeded:
                    raise RuntimeError(f"it failed on {host.name}:\n{answer}")
                answers.append(answer)
        finally:
            for _, process, ours in processes:
                ours.close()
                process.kill()
                process.join()
        return answers


def _call_on_host(answers: Connection, network: str, name: str, part: bytes) -> None:
    """Enter a host, call a function there, and send back what it returns."""
    try:
        os.setsid()  # Linux divides the cores among sessions first
        libc = ctypes.CDLL(None, use_errno=True)
        with open(network) as entrance:
            if libc.setns(entrance.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), f"{name} cannot be entered")
        socket.sethostname(name)
        torch.set_num_threads(1)
        answer = True, cloudpickle.loads(part)()
    except BaseException:  # reported where it can be seen
        answer = False, traceback.format_exc()
    answers.send(answer)
    answers.close()
    time.sleep(END_S)  # gloo now and then aborts on exit: the caller kills this process


def _drive(job: Job, workers: int, folder: Path, host: str) -> Profile:
    """The driver's part: serves the rounds."""

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        tell(folder / "address", averager.address)
        yield

    outcome = run(job, workers, launch, RunOptions(edge=EdgeOptions(host=host)))
    return Profile.of(outcome.recording)


def _work(job: Job, shard: Shard, rank: int, folder: Path, driver: str) -> None:
    """A worker's part."""
    own = folder / f"rank-{rank}"
    own.mkdir()
    placement = Placement(rank=rank, directory=own, network=Network(driver=driver))
    train(job, placement, hear(folder / "address"), shard)


def tell(path: Path, what: object) -> None:
    """Tell another host something, by a file that appears all at once."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(what))
    unfinished.rename(path)


def hear(path: Path) -> Any:
    """Return what another host tells, once it does; how long to wait is up to ``call``."""
    while not path.exists():
        time.sleep(POLL_S)
    return pickle.loads(path.read_bytes())
