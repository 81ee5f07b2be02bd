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
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import cloudpickle
import torch
from torch import Tensor

from sparkdl.averager.service.loop import EdgeOptions
from sparkdl.averager.service.server import Averager
from sparkdl.callbacks import Callback, Training
from sparkdl.collective import Network
from sparkdl.driver import Observers, RunOptions, first_replica, run
from sparkdl.events import EpochSummary
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.planner.profile import Profile
from sparkdl.worker import Job, Placement, train

FOLDER = Path(__file__).resolve().parent
POLL_S = 0.002
START_S = 120.0
HEADERS = 14 + 20 + 32
"""Bytes of Ethernet, IPv4 and TCP (with timestamps) headers before the payload of a packet."""
CLONE_NEWNET = 0x40000000
CLONE_NEWUTS = 0x04000000
"""Linux's flags for a network namespace and for a host name namespace."""
END_S = 600.0
TOKEN_BUCKET_S = 0.002
"""How long a link that was idle may exceed its speed."""


@dataclass(frozen=True)
class Traffic:
    """What has passed over a host's link.

    Attributes:
        received: bytes received, including headers.
        sent: bytes sent, including headers.
        received_payload: bytes received, without headers.
        sent_payload: bytes sent, without headers.
    """

    received: int
    sent: int
    received_payload: int
    sent_payload: int

    def since(self, before: Traffic) -> Traffic:
        """What has passed over it since then."""
        return Traffic(
            self.received - before.received,
            self.sent - before.sent,
            self.received_payload - before.received_payload,
            self.sent_payload - before.sent_payload,
        )


@dataclass(frozen=True)
class Point:
    """The state of a training at the end of an epoch, or before the first one.

    Attributes:
        rows: the rows that all workers together had trained on.
        seconds: the time since every worker had read its rows.
        traffic: the traffic of each host since then, the driver's first.
        loss: the loss of the driver's model on held-out rows.
    """

    rows: int
    seconds: float
    traffic: tuple[Traffic, ...]
    loss: float


@dataclass(frozen=True)
class Trained:
    """The results of a training.

    Attributes:
        points: its points in order; the first is that of the model before the training.
        traffic: the traffic of each host from before the workers joined until they had left, the
            driver's first.
        profile: what it cost, as it was recorded; None if no epoch ended.
    """

    points: tuple[Point, ...]
    traffic: tuple[Traffic, ...]
    profile: Profile | None = None


@dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        job: what is trained.
        shards: files of pickled record batches, one per worker.
        held_out: features and targets on which the loss is computed.
        budget_s: seconds after which it ends with the current epoch.
        least_epochs: how many epochs are trained in any case.
    """

    job: Job
    shards: Sequence[Path]
    held_out: tuple[Tensor, Tensor]
    budget_s: float = float("inf")
    least_epochs: int = 1


class LinkedHosts:
    """Some workers' hosts and the driver's; a context manager that takes them down again.

    Args:
        workers: the number of workers.
        folder: where their files go.
    """

    def __init__(self, workers: int, folder: Path) -> None:
        sys.path.insert(0, str(FOLDER.parents[1] / "tests" / "cluster"))
        from hosts import Hosts  # type: ignore[import-not-found]

        self._folder = folder
        self._trials = 0
        # Each host's name is unknown to all others, which torch would warn about.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._context = multiprocessing.get_context("forkserver")
        # The forking process has imported all that a script imports at the top level, which each
        # fork runs again; it finds the modules by the environment alone.
        paths = [str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        self._context.set_forkserver_preload([__name__, "harness", "strategy_tasks"])
        self._hosts = Hosts(workers + 1, folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hosts.close()

    @property
    def workers(self) -> list[Any]:
        """The workers' hosts (``tests/cluster/hosts.py``), for example to make one slow."""
        return list(self._hosts.hosts[1:])

    def limit(self, mbit: float) -> None:
        """Limit each link in both directions to a speed in megabits per second."""
        burst = max(16, round(mbit * 1e6 / 8 * TOKEN_BUCKET_S / 1000))
        for host in self._hosts.hosts:
            host.limit(mbit, burst_kb=burst)

    def train(self, trial: Trial, deadline_s: float = 300.0) -> Trained:
        """Train on all hosts.

        Args:
            trial: the training, with one shard per worker; fewer workers than there are hosts leave
                the last ones idle.
            deadline_s: seconds within which it has to end.

        Raises:
            TimeoutError: it is not over by then.
            RuntimeError: it failed; the message has the traceback.
        """
        self._trials += 1
        folder = self._folder / f"trial-{self._trials}"
        folder.mkdir()
        links = [host.link for host in self._hosts.hosts]
        driver = self._hosts.hosts[0].address
        before = [traffic_of(link) for link in links]
        parts: list[Callable[[], Any]] = [partial(_drive, trial, links, folder, driver)]
        parts += [
            partial(_work, trial.job, shard, rank, folder, driver)
            for rank, shard in enumerate(trial.shards)
        ]
        points, profile = self.call(parts, deadline_s)[0]
        now = [traffic_of(link) for link in links]
        shutil.rmtree(folder)
        return Trained(points, tuple(map(Traffic.since, now, before)), profile)

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


def traffic_of(link: str) -> Traffic:
    """What has passed over a host's link so far, counted at its end in this machine."""
    folder = Path("/sys/class/net", link, "statistics")
    numbers = [
        int((folder / name).read_text())
        for name in ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
    ]
    received, sent, packets_in, packets_out = numbers
    return Traffic(received, sent, received - HEADERS * packets_in, sent - HEADERS * packets_out)


@dataclass(eq=False)
class _Curve(Callback):
    """Keeps the driver's model of every epoch, with its time and the traffic until then.

    Workers wait for the next epoch meanwhile, as with any callback.
    """

    links: Sequence[str]
    budget_s: float
    least_epochs: int
    averager: Averager | None = None
    kept: list[tuple[int, float, tuple[Traffic, ...], list[Tensor]]] = field(default_factory=list)

    def on_start(self, training: Training, facts: DataStatistics) -> None:
        self._before = [traffic_of(link) for link in self.links]
        self._began = time.monotonic()

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        assert self.averager is not None
        seconds = time.monotonic() - self._began
        now = [traffic_of(link) for link in self.links]
        traffic = tuple(map(Traffic.since, now, self._before))
        rows = sum(each.examples for each in training.history)
        self.kept.append((rows, seconds, traffic, [each.clone() for each in self.averager.center]))
        if seconds > self.budget_s and len(self.kept) >= self.least_epochs:
            training.stop(f"{self.budget_s:g} s are over")


def _drive(
    trial: Trial, links: list[str], folder: Path, host: str
) -> tuple[tuple[Point, ...], Profile | None]:
    """The driver's part: serves the rounds, and computes the losses when all is over."""
    curve = _Curve(links, trial.budget_s, trial.least_epochs)

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        curve.averager = averager
        _publish(folder / "address", pickle.dumps(averager.address))
        yield

    outcome = run(
        trial.job,
        len(trial.shards),
        launch,
        RunOptions(edge=EdgeOptions(host=host)),
        Observers(callbacks=[curve]),
    )
    nothing = Traffic(0, 0, 0, 0)
    first = Point(0, 0.0, (nothing,) * len(links), _loss(trial, None))
    points = (
        Point(rows, seconds, traffic, _loss(trial, center))
        for rows, seconds, traffic, center in curve.kept
    )
    return (first, *points), Profile.of(outcome.recording) if curve.kept else None


def _loss(trial: Trial, center: list[Tensor] | None) -> float:
    replica = first_replica(trial.job)
    if center is not None:
        segments = replica.segments(with_optimizer=False)
        for values, held in zip(segments, center, strict=False):
            values.copy_(held)
    module = replica.release()
    features, targets = trial.held_out
    with torch.inference_mode():
        return float(trial.job.loss(module(features), targets))


def _work(job: Job, shard: Path, rank: int, folder: Path, driver: str) -> None:
    """A worker's part."""
    deadline = time.monotonic() + START_S
    while not (folder / "address").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the driver has told no address in {START_S:g} s")
        time.sleep(POLL_S)
    address = pickle.loads((folder / "address").read_bytes())
    own = folder / f"rank-{rank}"
    own.mkdir()
    placement = Placement(rank=rank, directory=own, network=Network(driver=driver))
    train(job, placement, address, pickle.loads(shard.read_bytes()))


def _publish(path: Path, content: bytes) -> None:
    """Write a file that appears all at once."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    unfinished.rename(path)
